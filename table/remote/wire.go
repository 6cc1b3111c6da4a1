// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// Path is where the table is served below the base URL.
const Path = "/cells/v1/routes"

// HeaderWire carries the version of the wire that a compare-and-set is written in.
const HeaderWire = "Cell-Table-Wire"

const (
	wireVersion = "1"
	maxBody     = 512 << 10 // of a compare-and-set
	maxAnswer   = 16 << 20  // of a page or a row
	trimPage    = 8 << 20   // a page is cut after this
	maxLine     = 4 << 20   // of a watch
	trimLine    = 256 << 10 // an update is cut after this
	typeJSON    = "application/json"
	typeNDJSON  = "application/x-ndjson"
	typeProblem = "application/problem+json"

	minHeartbeat = 50 * time.Millisecond
	maxHeartbeat = time.Minute
)

// ErrForbidden: the handler's authorisation refused the request. Nothing was done.
var ErrForbidden = errors.New("remote: forbidden")

// ErrReadOnly: the handler takes no changes. Nothing was done.
var ErrReadOnly = errors.New("remote: the table is read-only here")

// failure is an error on the wire.
type failure struct {
	Code   string `json:"code"`
	Status int    `json:"status,omitempty"`
	Detail string `json:"detail"`
}

// kinds are the codes; the first one that matches is sent.
var kinds = []struct {
	err    error
	code   string
	status int
}{
	{cells.ErrConflict, "conflict", http.StatusConflict},
	{cells.ErrNotFound, "not_found", http.StatusNotFound},
	{cells.ErrCompacted, "compacted", http.StatusGone},
	{ErrForbidden, "forbidden", http.StatusForbidden},
	{ErrReadOnly, "read_only", http.StatusMethodNotAllowed},
	{cells.ErrInvalid, "invalid", http.StatusUnprocessableEntity},
	{cells.ErrUnavailable, "unavailable", http.StatusServiceUnavailable},
}

// failureOf describes err for the peer. What it does not know is unavailable.
func failureOf(err error) failure {
	for _, k := range kinds {
		if errors.Is(err, k.err) {
			return failure{Code: k.code, Status: k.status, Detail: err.Error()}
		}
	}
	return failure{Code: "unavailable", Status: http.StatusServiceUnavailable, Detail: err.Error()}
}

// remoteError is a failure that the peer reported: it wraps the sentinel and says
// what the peer said.
type remoteError struct {
	kind   error
	detail string
}

func (e *remoteError) Error() string { return "remote table: " + e.detail }
func (e *remoteError) Unwrap() error { return e.kind }

// err returns the error that f describes; unavailable if its code is unknown.
func (f failure) err() error {
	for _, k := range kinds {
		if f.Code == k.code {
			return &remoteError{k.err, f.Detail}
		}
	}
	return fmt.Errorf("%w: remote table answers with code %q: %s", cells.ErrUnavailable, f.Code, f.Detail)
}

// swapBody is the body of a compare-and-set.
type swapBody struct {
	Old   cells.Revision    `json:"old"`
	Route cells.TenantRoute `json:"route"`
}

// page is a RoutePage on the wire.
type page struct {
	Routes   []cells.TenantRoute `json:"routes"`
	Revision cells.Revision      `json:"revision"`
	Next     cells.TenantID      `json:"next,omitempty"`
}

// line is a line of a watch.
type line struct {
	Revision cells.Revision      `json:"revision,omitempty"`
	Routes   []cells.TenantRoute `json:"routes,omitempty"`
	Alive    bool                `json:"alive,omitempty"`
	Error    *failure            `json:"error,omitempty"`
}

// decodeStrict reads exactly one JSON value of known, unrepeated fields.
func decodeStrict(b []byte, into any) error {
	if err := uniqueKeys(json.NewDecoder(bytes.NewReader(b)), 0); err != nil {
		return fmt.Errorf("%w: %w", cells.ErrInvalid, err)
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil {
		return fmt.Errorf("%w: %w", cells.ErrInvalid, err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("%w: something follows the document", cells.ErrInvalid)
	}
	return nil
}

// uniqueKeys walks one value and refuses repeated keys and deep nesting: two
// readers of such a document may see different rows.
func uniqueKeys(dec *json.Decoder, depth int) error {
	if depth > 8 {
		return errors.New("nested too deeply")
	}
	tok, err := dec.Token()
	if err != nil {
		return err
	}
	open, ok := tok.(json.Delim)
	if !ok {
		return nil
	}
	seen := make(map[string]bool)
	for dec.More() {
		if open == '{' {
			key, err := dec.Token()
			if err != nil {
				return err
			}
			k, _ := key.(string)
			// The decoder that follows takes a key in any case.
			if lower := string(bytes.ToLower([]byte(k))); seen[lower] || lower != k {
				return fmt.Errorf("field %q is repeated or not in lower case", k)
			}
			seen[k] = true
		}
		if err := uniqueKeys(dec, depth+1); err != nil {
			return err
		}
	}
	_, err = dec.Token()
	return err
}
