// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"encoding/json"
	"fmt"
	"strconv"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	kjson "k8s.io/apimachinery/pkg/util/json"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	"github.com/cloister-dev/cloister/cells"
)

// format is the version of status that this package writes, and the newest that
// it reads.
const format = 1

// statusOf returns the status that holds a row; the row's revision is not in it.
func statusOf(r cells.TenantRoute, old cells.Revision) (map[string]any, error) {
	r.Revision = 0
	enc, err := cells.EncodeRoute(r)
	if err != nil {
		return nil, err
	}
	var route map[string]any
	if err := kjson.Unmarshal(enc, &route); err != nil {
		return nil, fmt.Errorf("%w: %v", cells.ErrInvalid, err)
	}
	delete(route, "revision")
	// What it follows differs at every change, so that writing the same row again is
	// one: the server passes over an update that changes nothing.
	return map[string]any{"format": int64(format), "follows": strconv.FormatUint(uint64(old), 10), "route": route}, nil
}

// decode makes a row of an object; ok is false if it has none.
func decode(obj *unstructured.Unstructured) (r cells.TenantRoute, ok bool, err error) {
	status, _ := obj.Object["status"].(map[string]any)
	route, found := status["route"]
	if !found {
		return cells.TenantRoute{}, false, nil
	}
	fail := func(err error) (cells.TenantRoute, bool, error) {
		return cells.TenantRoute{}, true, fmt.Errorf("%s %s/%s: %w", Kind, obj.GetNamespace(), obj.GetName(), err)
	}
	switch f, _ := status["format"].(int64); {
	case f < 1:
		return fail(fmt.Errorf("%w: a status without a format", cells.ErrInvalid))
	case f > format:
		return fail(fmt.Errorf("%w: written in format %d by a newer version, this one reads up to %d; upgrade this program", cells.ErrInvalid, f, format))
	}
	enc, err := json.Marshal(route)
	if err != nil {
		return fail(fmt.Errorf("%w: %v", cells.ErrInvalid, err))
	}
	if r, err = cells.DecodeRoute(enc); err != nil {
		return fail(err)
	}
	tenant, _, _ := unstructured.NestedString(obj.Object, "spec", "tenant")
	if name, err := Name(r.TenantID); err != nil || name != obj.GetName() || tenant != string(r.TenantID) {
		return fail(fmt.Errorf("%w: holds the row of tenant %q, its spec names %q", cells.ErrInvalid, r.TenantID, tenant))
	}
	if r.Revision, err = revisionOf(obj.GetResourceVersion()); err != nil {
		return fail(err)
	}
	return r, true, nil
}

// follows returns the revision that the object's row replaced.
func follows(obj *unstructured.Unstructured) (cells.Revision, bool) {
	s, found, _ := unstructured.NestedString(obj.Object, "status", "follows")
	n, err := strconv.ParseUint(s, 10, 63)
	return cells.Revision(n), found && err == nil
}

// revisionOf reads a resourceVersion by the rule that makes them comparable.
func revisionOf(rv string) (cells.Revision, error) {
	// Compared with itself: the rule's own check of the form.
	if _, err := resourceversion.CompareResourceVersion(rv, rv); err != nil {
		return 0, fmt.Errorf("%w: resourceVersion %q cannot be ordered: this API server's are no integers", cells.ErrInvalid, rv)
	}
	n, err := strconv.ParseUint(rv, 10, 63)
	if err != nil {
		return 0, fmt.Errorf("%w: resourceVersion %q is too large", cells.ErrInvalid, rv)
	}
	return cells.Revision(n), nil
}

func rvString(r cells.Revision) string { return strconv.FormatUint(uint64(r), 10) }
