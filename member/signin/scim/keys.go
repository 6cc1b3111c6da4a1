// SPDX-License-Identifier: Apache-2.0

package scim

import (
	"encoding/json"
	"fmt"
	"slices"
	"sort"
	"strings"

	scimerrors "github.com/elimity-com/scim/errors"
	"github.com/elimity-com/scim/schema"
	filter "github.com/scim2/filter-parser/v2"

	"github.com/cloister-dev/cloister/cells"
)

// maxOperations bounds a patch, maxKey a path and a key of a value, in bytes.
const (
	maxOperations = 100
	maxKey        = 512
)

// bounded refuses a patch that would be much work to parse. What is no patch is left to
// the protocol.
func bounded(body []byte) error {
	var q struct{ Operations []json.RawMessage }
	if json.Unmarshal(body, &q) != nil {
		return nil
	}
	if len(q.Operations) > maxOperations {
		return &cells.Answer{Code: cells.CodeTooLarge, Detail: fmt.Sprintf("a patch has at most %d operations", maxOperations)}
	}
	for _, raw := range q.Operations {
		var op struct {
			Path  string
			Value any
		}
		if json.Unmarshal(raw, &op) == nil && (len(op.Path) > maxKey || longKey(op.Value)) {
			return &cells.Answer{Code: cells.CodeTooLarge, Detail: fmt.Sprintf("a path or a key of a patch has at most %d bytes", maxKey)}
		}
	}
	return nil
}

func longKey(v any) bool {
	switch v := v.(type) {
	case map[string]any:
		for k, e := range v {
			if len(k) > maxKey || longKey(e) {
				return true
			}
		}
	case []any:
		return slices.ContainsFunc(v, longKey)
	}
	return false
}

// target is what a key of a value names.
type target struct {
	key   string
	path  filter.Path
	value any
}

// named reads the value of an operation without a path: each key is an attribute, a path,
// or either behind the schema's id; the id alone holds attributes that are read alike.
// They come in the order of their keys, and none names what another names.
func named(s schema.Schema, m map[string]any) ([]target, error) {
	out, err := targets(s, m, true)
	if err != nil {
		return nil, err
	}
	sort.SliceStable(out, func(i, j int) bool { return out[i].key < out[j].key })
	for i := 1; i < len(out); i++ {
		if out[i].key == out[i-1].key {
			return nil, invalidPath("two keys name " + out[i].key)
		}
	}
	return out, nil
}

func targets(s schema.Schema, m map[string]any, outer bool) (out []target, err error) {
	for k, v := range m {
		if outer && strings.EqualFold(k, s.ID) {
			in, ok := v.(map[string]any)
			if !ok {
				return nil, scimerrors.ScimErrorInvalidValue
			}
			more, err := targets(s, in, false)
			if err != nil {
				return nil, err
			}
			out = append(out, more...)
			continue
		}
		path, err := filter.ParsePath([]byte(k))
		if err != nil {
			return nil, invalidPath(fmt.Sprintf("%.100q is no path", k))
		}
		name, key, ok := known(s, path)
		if !ok {
			return nil, invalidPath(fmt.Sprintf("%.100q names no attribute", k))
		}
		path.AttributePath.URIPrefix, path.AttributePath.AttributeName = nil, name
		out = append(out, target{key, path, v})
	}
	return out, nil
}

// known finds the attribute of a path, and a key that is the same for every way to
// write the path.
func known(s schema.Schema, p filter.Path) (name, key string, ok bool) {
	if uri := p.AttributePath.URI(); uri != "" && !strings.EqualFold(uri, s.ID) {
		return "", "", false
	}
	name, _ = nameOf(s, p.AttributePath.AttributeName)
	sub := p.AttributePath.SubAttributeName()
	if p.SubAttribute != nil {
		sub = *p.SubAttribute
	}
	a, ok := s.Attributes.ContainsAttribute(name)
	switch {
	case !ok:
		ok = name == schema.CommonAttributeExternalID && sub == "" && p.ValueExpression == nil
	case sub != "":
		_, ok = a.SubAttributes().ContainsAttribute(sub)
	}
	key = name
	if p.ValueExpression != nil {
		key += fmt.Sprintf("[%v]", p.ValueExpression)
	}
	if sub != "" {
		key += "." + strings.ToLower(sub)
	}
	return name, key, ok
}

func invalidPath(detail string) error {
	e := scimerrors.ScimErrorInvalidPath
	e.Detail = detail
	return e
}
