// SPDX-License-Identifier: Apache-2.0

// Package web is how the directory's listeners read requests and write answers:
// strictly, bounded in bytes and time, with the refusals of the closed list. It has no
// state and decides nothing.
package web

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

// bodyTimeout bounds the reading of a request's body.
const bodyTimeout = 10 * time.Second

// RequestID returns the request's id, its own if it is well formed, and echoes it.
func RequestID(w http.ResponseWriter, r *http.Request) string {
	id := r.Header.Get(api.HeaderRequestID)
	if cells.MoveID(id).Validate() != nil {
		id = "rq-" + rand.Text()
	}
	w.Header().Set(api.HeaderRequestID, id)
	return id
}

// Bad is a refusal of a request that is malformed.
func Bad(format string, args ...any) error {
	return &cells.Answer{Code: cells.CodeBadRequest, Detail: fmt.Sprintf(format, args...)}
}

// Decode reads exactly one JSON document of at most limit bytes into v, which names no
// member twice: another reader of the same bytes could take the other one. A strict one
// has no fields that v does not know. The error is an answer.
func Decode(w http.ResponseWriter, r *http.Request, v any, limit int64, strict bool) error {
	if t, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || t != api.ContentJSON {
		return Bad("the content type must be %s", api.ContentJSON)
	}
	ctl := http.NewResponseController(w)
	if err := ctl.SetReadDeadline(time.Now().Add(bodyTimeout)); err == nil {
		defer func() { _ = ctl.SetReadDeadline(time.Time{}) }()
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, limit))
	dec := json.NewDecoder(bytes.NewReader(body))
	if strict {
		dec.DisallowUnknownFields()
	}
	if err == nil {
		err = dec.Decode(v)
	}
	if err == nil {
		err = once(json.NewDecoder(bytes.NewReader(body)), 0)
	}
	if err == nil {
		if err = dec.Decode(new(json.RawMessage)); errors.Is(err, io.EOF) {
			return nil
		} else if err == nil {
			err = errors.New("more than one document")
		}
	}
	var big *http.MaxBytesError
	if errors.As(err, &big) {
		return &cells.Answer{Code: cells.CodeTooLarge, Detail: fmt.Sprintf("a body has at most %d bytes", limit)}
	}
	return Bad("the body is not the JSON document that this path takes: %v", err)
}

// once refuses a document with a member that an object has twice. The document itself
// is read into fields whatever the case of their names; what is below may be maps.
func once(dec *json.Decoder, depth int) error {
	t, err := dec.Token()
	if err != nil {
		return err
	}
	open, ok := t.(json.Delim)
	if !ok {
		return nil
	}
	names := map[string]bool{}
	for dec.More() {
		if open == '{' {
			t, err := dec.Token()
			if err != nil {
				return err
			}
			name, _ := t.(string)
			if depth == 0 {
				name = strings.ToLower(name)
			}
			if names[name] {
				return fmt.Errorf("the member %.64q is there twice", name)
			}
			names[name] = true
		}
		if err := once(dec, depth+1); err != nil {
			return err
		}
	}
	_, err = dec.Token()
	return err
}

// WriteJSON answers with a JSON document that nobody keeps.
func WriteJSON(w http.ResponseWriter, status int, v any) {
	body, err := json.Marshal(v)
	if err != nil { // our own types always marshal
		http.Error(w, "cannot encode", http.StatusInternalServerError)
		return
	}
	h := w.Header()
	h.Set("Content-Type", api.ContentJSON)
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Content-Length", strconv.Itoa(len(body)+1))
	w.WriteHeader(status)
	_, _ = w.Write(append(body, '\n'))
}

// Query reads the parameters of a request and refuses unknown and repeated ones.
func Query(r *http.Request, names ...string) (map[string]string, error) {
	out := map[string]string{}
	for name, values := range r.URL.Query() {
		known := false
		for _, n := range names {
			known = known || n == name
		}
		if !known {
			return nil, Bad("unknown parameter %q; known are %s", name, strings.Join(names, ", "))
		}
		if len(values) != 1 {
			return nil, Bad("parameter %q is given %d times", name, len(values))
		}
		out[name] = values[0]
	}
	return out, nil
}

// Number reads a parameter from 0 to limit; "" is 0.
func Number(v, name string, limit int64) (int64, error) {
	if v == "" {
		return 0, nil
	}
	n, err := strconv.ParseInt(v, 10, 64)
	if err != nil || n < 0 || n > limit {
		return 0, Bad("%s must be a number from 0 to %d", name, limit)
	}
	return n, nil
}
