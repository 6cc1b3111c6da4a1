// SPDX-License-Identifier: Apache-2.0

package cells_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// written returns the response that WriteProblem makes.
func written(r *http.Request, a *cells.Answer) *http.Response {
	w := httptest.NewRecorder()
	w.Header().Set("Etag", "of another answer")
	w.Header().Set("Content-Encoding", "gzip")
	cells.WriteProblem(w, r, a)
	return w.Result()
}

func grpcRequest() *http.Request {
	r := httptest.NewRequest(http.MethodPost, "/pkg.Service/Method", nil)
	r.Proto, r.ProtoMajor, r.ProtoMinor = "HTTP/2.0", 2, 0
	r.Header.Set("Content-Type", "application/grpc+proto")
	return r
}

// Every code goes through both forms and comes back as it was.
func TestProblemRoundTrip(t *testing.T) {
	for _, code := range cells.Codes() {
		in := &cells.Answer{
			Code: code, Tenant: "acme", Cell: "cell-a", Detail: "50% of \"it\" – \n and more", Revision: 1 << 63,
			Age: 1500*time.Millisecond + 1, RetryAfter: 1200 * time.Millisecond, Err: errors.New("a secret"),
		}
		resp := written(httptest.NewRequest("GET", "/a%20b/c?token=secret", nil), in)
		body, _ := io.ReadAll(resp.Body)
		resp.Body = io.NopCloser(bytes.NewReader(body))
		if bytes.Contains(body, []byte("secret")) {
			t.Errorf("%s: the document tells a secret: %s", code, body)
		}
		var doc map[string]any
		if err := json.Unmarshal(body, &doc); err != nil {
			t.Fatal(err)
		}
		if doc["status"] != float64(code.HTTPStatus()) || doc["instance"] != "/a%20b/c" || doc["title"] != code.Title() || doc["retry"] != code.Retry() || doc["age_ms"] != 1500.0 {
			t.Errorf("%s: document %v", code, doc)
		}
		if resp.StatusCode != code.HTTPStatus() || resp.Header.Get("Retry-After") != "2" || resp.Header.Get("Content-Type") != "application/problem+json" ||
			resp.Header.Get("Etag") != "" || resp.Header.Get("Content-Encoding") != "" || resp.Header.Get("Cell-Age") != "1500" {
			t.Errorf("%s: %d %v", code, resp.StatusCode, resp.Header)
		}
		got, ok := cells.ReadProblem(resp)
		want := cells.Answer{Code: code, Tenant: "acme", Detail: in.Detail, Revision: 1 << 63, Age: 1500 * time.Millisecond, RetryAfter: 2 * time.Second}
		if !ok || *got != want {
			t.Errorf("%s: came back as %+v", code, got)
		}
		if again, _ := io.ReadAll(resp.Body); !bytes.Equal(again, body) {
			t.Errorf("%s: the body cannot be read again: %q", code, again)
		}

		resp = written(grpcRequest(), in)
		if b, _ := io.ReadAll(resp.Body); resp.StatusCode != http.StatusOK || len(b) != 0 {
			t.Errorf("%s over gRPC: %d %q", code, resp.StatusCode, b)
		}
		got, ok = cells.ReadProblem(resp)
		want.RetryAfter = in.RetryAfter
		if !ok || *got != want {
			t.Errorf("%s over gRPC: came back as %+v", code, got)
		}
	}
}

func TestWriteProblemOutsideTheList(t *testing.T) {
	resp := written(httptest.NewRequest("GET", "/", nil), &cells.Answer{Code: "EVIL", Tenant: "a/b"})
	body, _ := io.ReadAll(resp.Body)
	if resp.StatusCode != http.StatusInternalServerError || resp.Header.Get(cells.HeaderAnswer) != "" || bytes.Contains(body, []byte("a/b")) {
		t.Errorf("%d %v %s", resp.StatusCode, resp.Header, body)
	}
	resp = written(httptest.NewRequest("HEAD", "/", nil), &cells.Answer{Code: cells.CodeMoving})
	resp.Request = httptest.NewRequest("HEAD", "/", nil)
	body, _ = io.ReadAll(resp.Body)
	if a, ok := cells.ReadProblem(resp); len(body) != 0 || !ok || a.Code != cells.CodeMoving {
		t.Errorf("HEAD: %q %v", body, a)
	}
	long := &cells.Answer{Code: cells.CodeMoving, Detail: strings.Repeat("ü", 1<<20)}
	resp = written(httptest.NewRequest("GET", "/"+strings.Repeat("x", 1<<17), nil), long)
	if a, ok := cells.ReadProblem(resp); !ok || len(a.Detail) > 2048 {
		t.Errorf("a long detail and path: %v", ok)
	}
}

// What is not exactly an answer of the platform is a service's, and passes with
// its body whole.
func TestReadProblemIsStrict(t *testing.T) {
	good := func() *http.Response {
		return written(httptest.NewRequest("GET", "/x", nil), &cells.Answer{Code: cells.CodeStaleRoute, Tenant: "acme", Revision: 7})
	}
	if _, ok := cells.ReadProblem(good()); !ok {
		t.Fatal("the good one is not read")
	}
	swap := func(old, new string) func(*http.Response) {
		return func(r *http.Response) {
			b, _ := io.ReadAll(r.Body)
			if !bytes.Contains(b, []byte(old)) {
				t.Fatalf("no %q in %s", old, b)
			}
			r.Body = io.NopCloser(bytes.NewReader(bytes.Replace(b, []byte(old), []byte(new), 1)))
		}
	}
	body := func(s string) func(*http.Response) {
		return func(r *http.Response) { r.Body = io.NopCloser(strings.NewReader(s)) }
	}
	set := func(k, v string) func(*http.Response) { return func(r *http.Response) { r.Header.Set(k, v) } }
	for name, change := range map[string]func(*http.Response){
		"no Cell-Answer":     func(r *http.Response) { r.Header.Del("Cell-Answer") },
		"two Cell-Answers":   func(r *http.Response) { r.Header.Add("Cell-Answer", "STALE_ROUTE") },
		"unknown code":       set("Cell-Answer", "EVIL"),
		"another code":       set("Cell-Answer", "WRONG_CELL"),
		"another status":     func(r *http.Response) { r.StatusCode = 200 },
		"html":               set("Content-Type", "text/html"),
		"no type":            func(r *http.Response) { r.Header.Del("Content-Type") },
		"bad revision":       set("Cell-Revision", "-1"),
		"other revision":     set("Cell-Revision", "8"),
		"bad age":            set("Cell-Age", "x"),
		"negative age":       set("Cell-Age", "-1"),
		"age too large":      set("Cell-Age", "9223372036854775807"),
		"bad retry-after":    set("Retry-After", "soon"),
		"no body":            func(r *http.Response) { r.Body = nil },
		"empty body":         body(""),
		"no JSON":            body("<html>"),
		"two documents":      swap("}", "}{}"),
		"unknown member":     swap(`"code"`, `"kode"`),
		"other code inside":  swap(`"code":"STALE_ROUTE"`, `"code":"MOVING"`),
		"other retry":        swap(`"retry":true`, `"retry":false`),
		"other status":       swap(`"status":409`, `"status":503`),
		"other type":         swap("urn:cells:problem:stale_route", "about:blank"),
		"bad tenant":         swap(`"tenant":"acme"`, `"tenant":"a/b"`),
		"too large":          body(strings.Repeat(" ", 1<<20)),
		"broken body":        func(r *http.Response) { r.Body = io.NopCloser(iotest.ErrReader(io.ErrUnexpectedEOF)) },
		"gRPC without parts": set("Content-Type", "application/grpc"),
	} {
		t.Run(name, func(t *testing.T) {
			resp := good()
			change(resp)
			var before []byte
			if resp.Body != nil && name != "broken body" {
				before, _ = io.ReadAll(resp.Body)
				resp.Body = io.NopCloser(bytes.NewReader(before))
			}
			if a, ok := cells.ReadProblem(resp); ok {
				t.Errorf("taken for %v", a)
			}
			if resp.Body == nil {
				return
			}
			after, err := io.ReadAll(resp.Body)
			if !bytes.Equal(after, before) || (err != nil) != (name == "broken body") {
				t.Errorf("the body was %d bytes and is %d (%v)", len(before), len(after), err)
			}
		})
	}
}
