// SPDX-License-Identifier: Apache-2.0

package tenancy_test

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	mt "github.com/cloister-dev/cloister/member/tenancy"
)

func TestHTTPRouter(t *testing.T) {
	token := "lcr_" + strings.Repeat("ab", 64)
	var reply func(w http.ResponseWriter, r *http.Request)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer "+token {
			t.Errorf("%s %s: another credential", r.Method, r.URL)
		}
		reply(w, r)
	}))
	defer srv.Close()
	h, err := mt.NewHTTPRouter(srv.URL, token, srv.Client())
	if err != nil {
		t.Fatal(err)
	}
	defer srv.Client().CloseIdleConnections()
	call := mt.PlaceCall{Cell: "a", Tenant: "t", Fingerprint: fingerprint("a.example")}
	text := func(status int, body string) func(http.ResponseWriter, *http.Request) {
		return func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status); _, _ = io.WriteString(w, body) }
	}
	reply = func(w http.ResponseWriter, r *http.Request) {
		var got mt.PlaceCall
		if err := json.NewDecoder(r.Body).Decode(&got); err != nil || r.Method != "POST" || r.URL.Path != "/cells/v1/placements" || got.Tenant != "t" || got.Cell != "a" || !got.Fingerprint.Equal(call.Fingerprint) {
			t.Errorf("%s %s %+v, %v", r.Method, r.URL, got, err)
		}
		_, _ = io.WriteString(w, `{"cell":"b","deployment_id":"d","more":1}`)
	}
	if w, err := h.Place(t.Context(), call); err != nil || w != (mt.Winner{Cell: "b", DeploymentID: "d"}) {
		t.Errorf("%+v, %v", w, err)
	}
	for name, f := range map[string]func(http.ResponseWriter, *http.Request){
		"no JSON": text(200, "hello"), "two": text(200, `{"cell":"a"}{}`), "large": text(200, `{"cell":"`+strings.Repeat("a", 70000)+`"}`),
		"created": text(201, `{"cell":"a"}`), "page": text(503, "<html>"), "redirect": func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/elsewhere", 307) },
	} {
		reply = f
		if w, err := h.Place(t.Context(), call); !errors.Is(err, cells.ErrUnavailable) || w != (mt.Winner{}) {
			t.Errorf("%s: %+v, %v", name, w, err)
		}
		if yes, err := h.Attaching(t.Context(), "a"); yes || err == nil {
			t.Errorf("%s: attaching %t, %v", name, yes, err)
		}
	}
	reply = func(w http.ResponseWriter, r *http.Request) {
		cells.WriteProblem(w, r, &cells.Answer{Code: cells.CodeRateLimited, RetryAfter: 9 * time.Second})
	}
	if _, err := h.Place(t.Context(), call); codeOf(err) != cells.CodeRateLimited || cells.AnswerOf(err).RetryAfter != 9*time.Second {
		t.Errorf("past the rate: %v", err)
	}
	for body, want := range map[string]string{
		`{"cell":"a","state":"attaching","first":true}`: "true", `{"cell":"a","state":"serving","first":true}`: "false", `{"cell":"a","state":"attaching"}`: "false",
		`{"cell":"b","state":"attaching","first":true}`: "error", `{"cell":"a","first":true}`: "error", `{}`: "error",
	} {
		reply = text(200, body)
		yes, err := h.Attaching(t.Context(), "a")
		got := map[bool]string{true: "true", false: "false"}[yes]
		if err != nil {
			got = "error"
		}
		if got != want {
			t.Errorf("%s: %s", body, got)
		}
	}
	for _, base := range []string{"", "r.example", "ftp://r", "https://u@r", "https://r/path", "https://r?q", "https://"} {
		if _, err := mt.NewHTTPRouter(base, token, nil); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%q: %v", base, err)
		}
	}
	if _, err := mt.NewHTTPRouter(srv.URL, token[:20], nil); !errors.Is(err, cells.ErrInvalid) || strings.Contains(err.Error(), token[4:20]) {
		t.Error(err)
	}
}
