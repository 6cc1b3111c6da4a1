// SPDX-License-Identifier: Apache-2.0

package client

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
	"github.com/cloister-dev/cloister/directory/deploy/wire"
	rules "github.com/cloister-dev/cloister/guard/tenancy"
	"github.com/cloister-dev/cloister/member/tenancy"
)

// What is no whole answer of the router about this cell is an error, never a winner or
// a state.
func TestProcessRouter(t *testing.T) {
	token := "lcr_" + strings.Repeat("ab", 64)
	var reply http.HandlerFunc
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer "+token {
			t.Errorf("%s: another credential", r.URL)
		}
		reply(w, r)
	}))
	defer srv.Close()
	c, err := NewCell("a", srv.URL, token, client.WithHTTPClient(srv.Client()))
	if err != nil {
		t.Fatal(err)
	}
	r := c.Router()
	call := tenancy.PlaceCall{Cell: "a", Tenant: "t", Fingerprint: rules.Fingerprint{Schema: 1, Fields: map[string][]string{"hosts": {"h"}}}}
	text := func(status int, body string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", api.ContentJSON)
			w.Header().Set(api.HeaderRequestID, "r")
			w.WriteHeader(status)
			_, _ = io.WriteString(w, body)
		}
	}
	reply = func(w http.ResponseWriter, req *http.Request) {
		var got wire.Place
		if err := json.NewDecoder(req.Body).Decode(&got); err != nil || req.URL.Path != wire.PathPlacements || got.Tenant != "t" || got.Cell != "a" || !got.Fingerprint.Equal(call.Fingerprint) {
			t.Errorf("%s %+v, %v", req.URL, got, err)
		}
		text(200, `{"tenant":"t","cell":"b","deployment_id":"d"}`)(w, req)
	}
	if w, err := r.Place(t.Context(), call); err != nil || w != (tenancy.Winner{Cell: "b", DeploymentID: "d"}) {
		t.Errorf("%+v, %v", w, err)
	}
	for body, want := range map[string]string{`{"cell":"a","state":"attaching"}`: "true", `{"cell":"a","state":"serving"}`: "false",
		`{"cell":"b","state":"attaching"}`: "error", `{"cell":"a","state":"gone"}`: "error", `{}`: "error", `hello`: "error"} {
		reply = text(200, body)
		yes, err := r.Attaching(t.Context(), "a")
		got := map[bool]string{true: "true", false: "false"}[yes]
		if err != nil {
			got = "error"
		}
		if got != want {
			t.Errorf("%s: %s, %v", body, got, err)
		}
	}
	for name, f := range map[string]http.HandlerFunc{"another tenant": text(200, `{"tenant":"x","cell":"a","deployment_id":"d"}`), "no JSON": text(200, "hello"), "page": text(503, "<html>"),
		"redirect": func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "/elsewhere", http.StatusTemporaryRedirect)
		}} {
		reply = f
		if w, err := r.Place(t.Context(), call); err == nil || w != (tenancy.Winner{}) {
			t.Errorf("%s: %+v, %v", name, w, err)
		}
	}
	reply = func(w http.ResponseWriter, r *http.Request) {
		cells.WriteProblem(w, r, &cells.Answer{Code: cells.CodeOverloaded, RetryAfter: 9 * time.Second})
	}
	if _, err := r.Place(t.Context(), call); cells.AnswerOf(err) == nil || cells.AnswerOf(err).RetryAfter != 9*time.Second {
		t.Errorf("past the pace: %v", err)
	}
	call.Cell = "b"
	if _, err := r.Place(t.Context(), call); err == nil {
		t.Error("it asks for another cell")
	}
}
