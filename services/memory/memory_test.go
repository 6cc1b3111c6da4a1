// SPDX-License-Identifier: Apache-2.0

package memory_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/internal/pgtest"
	"github.com/cloister-dev/cloister/services/memory"
)

func TestMain(m *testing.M) { os.Exit(pgtest.Main(m)) }

// each runs a test on both stores, alone and without cells.
func each(t *testing.T, f func(t *testing.T, base string, s *memory.Store)) {
	open := map[string]func(t *testing.T) (*memory.Store, error){
		"sqlite": func(t *testing.T) (*memory.Store, error) {
			return memory.OpenSQLite(t.Context(), filepath.Join(t.TempDir(), "m.db"), memory.OpenOptions{})
		},
		"postgres": func(t *testing.T) (*memory.Store, error) {
			return memory.OpenPostgres(t.Context(), pgtest.DB(t), memory.OpenOptions{})
		},
	}
	for name, o := range open {
		t.Run(name, func(t *testing.T) {
			s, err := o(t)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = s.Close() })
			svc := memory.New(s, memory.Options{Tenant: memory.HeaderTenant("X-Tenant")})
			srv := httptest.NewServer(svc.Handler())
			t.Cleanup(srv.Close)
			f(t, srv.URL, s)
		})
	}
}

type reply struct {
	status int
	memory.Item
	Code   string
	Items  []memory.Item
	Cursor string
	Before int64
}

func post(t *testing.T, base, op, tenant, body string) reply {
	t.Helper()
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, base+"/v1/memory."+op, strings.NewReader(body))
	req.Header.Set("X-Tenant", tenant)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	r := reply{status: resp.StatusCode}
	var raw bytes.Buffer
	_, _ = raw.ReadFrom(resp.Body)
	if err := json.Unmarshal(raw.Bytes(), &r); err != nil {
		t.Fatalf("%s: %v: %s", op, err, raw.String())
	}
	return r
}

func TestVersionsAndConditions(t *testing.T) {
	each(t, func(t *testing.T, base string, _ *memory.Store) {
		set := func(body string) reply { return post(t, base, "set", "t1", body) }
		if r := set(`{"namespace":"n","key":"k","value":{"a": 1}}`); r.status != 200 || r.Version != 1 || r.EventSeq != 1 {
			t.Fatalf("first set: %+v", r)
		}
		if r := set(`{"namespace":"n","key":"k","value":2,"if_version":0}`); r.status != 409 || r.Code != "VERSION_CONFLICT" || r.Version != 1 {
			t.Fatalf("set of what is there, if it is not: %+v", r)
		}
		if r := set(`{"namespace":"n","key":"k","value":2,"if_version":1}`); r.status != 200 || r.Version != 2 || r.EventSeq != 2 {
			t.Fatalf("conditional set: %+v", r)
		}
		if r := post(t, base, "delete", "t1", `{"namespace":"n","key":"k","if_version":2}`); r.status != 200 || r.Version != 3 || !r.Deleted {
			t.Fatalf("delete: %+v", r)
		}
		if r := post(t, base, "get", "t1", `{"namespace":"n","key":"k"}`); r.status != 404 || r.Code != "NO_SUCH_MEMORY" {
			t.Fatalf("get of what was deleted: %+v", r)
		}
		if r := set(`{"namespace":"n","key":"k","value":"again","if_version":0}`); r.status != 200 || r.Version != 4 {
			t.Fatalf("set after delete: %+v", r)
		}
		h := post(t, base, "history", "t1", `{"namespace":"n","key":"k"}`)
		var got []string
		for _, it := range h.Items {
			got = append(got, fmt.Sprintf("%d:%s", it.Version, it.Value))
		}
		if want := `[4:"again" 3: 2:2 1:{"a":1}]`; fmt.Sprint(got) != want {
			t.Fatalf("history %v, want %s", got, want)
		}
		if r := post(t, base, "get", "t2", `{"namespace":"n","key":"k"}`); r.status != 404 {
			t.Fatalf("another tenant sees it: %+v", r)
		}
	})
}

func TestBulkIsAllOrNothing(t *testing.T) {
	each(t, func(t *testing.T, base string, _ *memory.Store) {
		ok := post(t, base, "bulk_set", "t", `{"items":[{"namespace":"n","key":"b","value":1},{"namespace":"n","key":"a","value":2}]}`)
		if ok.status != 200 || len(ok.Items) != 2 || ok.Items[0].Key != "b" || ok.Items[0].EventSeq != ok.Items[1].EventSeq {
			t.Fatalf("bulk_set: %+v", ok)
		}
		if r := post(t, base, "bulk_set", "t", `{"items":[{"namespace":"n","key":"c","value":1},{"namespace":"n","key":"a","value":2,"if_version":7}]}`); r.status != 409 {
			t.Fatalf("bulk_set with a condition that fails: %+v", r)
		}
		got := post(t, base, "bulk_get", "t", `{"items":[{"namespace":"n","key":"a"},{"namespace":"n","key":"c"},{"namespace":"n","key":"b"}]}`)
		if len(got.Items) != 2 || got.Items[0].Key != "a" || got.Items[1].Key != "b" {
			t.Fatalf("bulk_get: %+v", got)
		}
	})
}

func TestPagesAreCompleteAndOrdered(t *testing.T) {
	each(t, func(t *testing.T, base string, _ *memory.Store) {
		var items []string
		for i := range 250 {
			items = append(items, fmt.Sprintf(`{"namespace":"n","key":"k%03d","value":%d}`, i, i))
		}
		items = append(items, `{"namespace":"n","key":"ä-umlaut","value":0}`, `{"namespace":"other","key":"k001","value":0}`)
		if r := post(t, base, "bulk_set", "t", `{"items":[`+strings.Join(items, ",")+`]}`); r.status != 200 {
			t.Fatalf("bulk_set: %+v", r)
		}
		seen, cursor := 0, ""
		last := ""
		for {
			r := post(t, base, "list", "t", fmt.Sprintf(`{"namespace":"n","prefix":"k","limit":40,"cursor":%q}`, cursor))
			for _, it := range r.Items {
				if it.Key <= last || !strings.HasPrefix(it.Key, "k") {
					t.Fatalf("key %q after %q", it.Key, last)
				}
				last = it.Key
				seen++
			}
			if cursor = r.Cursor; cursor == "" {
				break
			}
		}
		if seen != 250 {
			t.Fatalf("saw %d of 250", seen)
		}
		if r := post(t, base, "list", "t", `{"namespace":"n","prefix":"ä"}`); len(r.Items) != 1 {
			t.Fatalf("prefix of another alphabet: %+v", r)
		}
	})
}

// Writers that race for one key each get a version of their own, and events have
// no gap.
func TestConcurrentWriters(t *testing.T) {
	each(t, func(t *testing.T, base string, s *memory.Store) {
		const writers, each = 8, 12
		var mu sync.Mutex
		versions := map[int64]int{}
		var wg sync.WaitGroup
		for w := range writers {
			wg.Go(func() {
				for i := range each {
					r := post(t, base, "set", "t", fmt.Sprintf(`{"namespace":"n","key":"k","value":"%d-%d"}`, w, i))
					mu.Lock()
					versions[r.Version]++
					mu.Unlock()
				}
			})
		}
		wg.Wait()
		for v := int64(1); v <= writers*each; v++ {
			if versions[v] != 1 {
				t.Fatalf("version %d was given %d times", v, versions[v])
			}
		}
		events, err := s.Outbox().Events(t.Context(), "t", 0, 1000)
		if err != nil || len(events) != writers*each {
			t.Fatalf("%d events, %v", len(events), err)
		}
		for i, e := range events {
			if e.Seq != cells.EventSeq(i+1) {
				t.Fatalf("event %d has number %d", i+1, e.Seq)
			}
		}
	})
}

func TestRefusals(t *testing.T) {
	each(t, func(t *testing.T, base string, _ *memory.Store) {
		for name, body := range map[string]string{
			"unknown field": `{"namespace":"n","key":"k","value":1,"extra":1}`,
			"no key":        `{"namespace":"n","value":1}`,
			"NUL in key":    `{"namespace":"n","key":"a\u0000b","value":1}`,
			"no value":      `{"namespace":"n","key":"k"}`,
			"long key":      `{"namespace":"n","key":"` + strings.Repeat("k", 513) + `","value":1}`,
			"two documents": `{"namespace":"n","key":"k","value":1}{}`,
			"not JSON":      `nonsense`,
			"key twice":     ``,
		} {
			op := "set"
			if body == "" {
				op, body = "bulk_set", `{"items":[{"namespace":"n","key":"a","value":1},{"namespace":"n","key":"a","value":2}]}`
			}
			if r := post(t, base, op, "t", body); r.status != 400 || r.Code != "BAD_REQUEST" {
				t.Errorf("%s: %d %s", name, r.status, r.Code)
			}
		}
		if r := post(t, base, "list", "t", `{"namespace":"n","cursor":"***"}`); r.status != 400 {
			t.Errorf("forged cursor: %d", r.status)
		}
		if r := post(t, base, "set", "bad tenant!", `{"namespace":"n","key":"k","value":1}`); r.status != 400 || r.Code != "INVALID_TENANT" {
			t.Errorf("malformed tenant: %d %s", r.status, r.Code)
		}
	})
}

// A stream begins where Last-Event-ID says and delivers what comes later at once.
func TestStreamResumes(t *testing.T) {
	each(t, func(t *testing.T, base string, _ *memory.Store) {
		for i := range 3 {
			post(t, base, "set", "t", fmt.Sprintf(`{"namespace":"n","key":"k","value":%d}`, i))
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		req, _ := http.NewRequestWithContext(ctx, http.MethodGet, base+"/v1/events", nil)
		req.Header.Set("X-Tenant", "t")
		req.Header.Set("Last-Event-ID", "2")
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		sc := bufio.NewScanner(resp.Body)
		next := func() string {
			for sc.Scan() {
				if id, ok := strings.CutPrefix(sc.Text(), "id: "); ok {
					return id
				}
			}
			return fmt.Sprint("end of stream: ", sc.Err())
		}
		if id := next(); id != "3" {
			t.Fatalf("first event is %s, want 3", id)
		}
		post(t, base, "delete", "t", `{"namespace":"n","key":"k"}`)
		if id := next(); id != "4" {
			t.Fatalf("next event is %s, want 4", id)
		}
	})
}

// In a cell, a request without an admission is refused before it runs.
func TestNoAdmissionIsRefused(t *testing.T) {
	s, err := memory.OpenSQLite(t.Context(), filepath.Join(t.TempDir(), "m.db"), memory.OpenOptions{Cell: "cell-a"})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	srv := httptest.NewServer(memory.New(s, memory.Options{}).Handler())
	defer srv.Close()
	if r := post(t, srv.URL, "set", "t", `{"namespace":"n","key":"k","value":1}`); r.status != 503 || r.Code != string(cells.CodeTenancyRefused) {
		t.Fatalf("set without an admission: %+v", r)
	}
	if _, err := s.Write(t.Context(), "t", "memory.set", []memory.Write{{Ref: memory.Ref{Namespace: "n", Key: "k"}, Value: json.RawMessage("1")}}); !errors.Is(err, cells.ErrFenced) {
		t.Fatalf("write without an admission: %v", err)
	}
}

// However large the values are, an answer is not: pages end early and say so.
func TestAnswersAreBounded(t *testing.T) {
	s, err := memory.OpenSQLite(t.Context(), filepath.Join(t.TempDir(), "m.db"), memory.OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	srv := httptest.NewServer(memory.New(s, memory.Options{Tenant: memory.HeaderTenant("X-Tenant")}).Handler())
	t.Cleanup(srv.Close)
	const n = 18
	value := strings.Repeat("x", memory.MaxValue-2)
	var refs []string
	for i := range n {
		for _, key := range []string{fmt.Sprintf("k%02d", i), "same"} {
			if r := post(t, srv.URL, "set", "t", fmt.Sprintf(`{"namespace":"n","key":%q,"value":%q}`, key, value)); r.status != 200 {
				t.Fatalf("set: %+v", r)
			}
		}
		refs = append(refs, fmt.Sprintf(`{"namespace":"n","key":"k%02d"}`, i))
	}
	all := func(op, body string, next func(r reply) string) (items, pages int) {
		for more := ""; ; {
			r := post(t, srv.URL, op, "t", fmt.Sprintf(body, more))
			if r.status != 200 || len(r.Items) == 0 || len(r.Items) > 16 {
				t.Fatalf("%s: status %d, %d items", op, r.status, len(r.Items))
			}
			items, pages = items+len(r.Items), pages+1
			if more = next(r); more == "" {
				return items, pages
			}
		}
	}
	items, pages := all("list", `{"namespace":"n"%s}`, func(r reply) string {
		if r.Cursor == "" {
			return ""
		}
		return fmt.Sprintf(`,"cursor":%q`, r.Cursor)
	})
	if items != n+1 || pages != 2 {
		t.Errorf("list gave %d items on %d pages", items, pages)
	}
	items, pages = all("history", `{"namespace":"n","key":"same"%s}`, func(r reply) string {
		if r.Before == 0 {
			return ""
		}
		return fmt.Sprintf(`,"before":%d`, r.Before)
	})
	if items != n || pages != 2 {
		t.Errorf("history gave %d items on %d pages", items, pages)
	}
	if r := post(t, srv.URL, "bulk_get", "t", `{"items":[`+strings.Join(refs, ",")+`]}`); r.status != 413 || r.Code != string(cells.CodeTooLarge) {
		t.Errorf("bulk_get of too much: %d %s", r.status, r.Code)
	}
	if r := post(t, srv.URL, "bulk_get", "t", `{"items":[`+strings.Join(refs[:4], ",")+`]}`); r.status != 200 || len(r.Items) != 4 {
		t.Errorf("bulk_get: %d, %d items", r.status, len(r.Items))
	}
}

// TestProcessesStartTogether: the processes of a new cell create the schema at the
// same time.
func TestProcessesStartTogether(t *testing.T) {
	dsn := pgtest.DB(t)
	var wg sync.WaitGroup
	for range 6 {
		wg.Go(func() {
			s, err := memory.OpenPostgres(t.Context(), dsn, memory.OpenOptions{Cell: "a"})
			if err != nil {
				t.Error(err)
				return
			}
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

// What clients see of a refusal is a problem document in their words.
func TestRefusalsInClientsWords(t *testing.T) {
	each(t, func(t *testing.T, base string, _ *memory.Store) {
		ask := func(method, path, body string) (int, string, string) {
			t.Helper()
			req, _ := http.NewRequestWithContext(t.Context(), method, base+path, strings.NewReader(body))
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			var p struct{ Code, Detail string }
			if err := json.NewDecoder(resp.Body).Decode(&p); err != nil || resp.Header.Get("Content-Type") != "application/problem+json" {
				t.Fatalf("%s %s: %v, %s", method, path, err, resp.Header.Get("Content-Type"))
			}
			return resp.StatusCode, p.Code, p.Detail
		}
		big := `"` + strings.Repeat("x", memory.MaxValue) + `"`
		for _, c := range []struct {
			method, path, body string
			status             int
			code, detail       string
		}{
			{"POST", "/v1/memory.set", "", 400, "BAD_REQUEST", "the body is empty"},
			{"POST", "/v1/memory.set", "[]", 400, "BAD_REQUEST", "the body is a JSON array; want an object"},
			{"POST", "/v1/memory.set", `{"namespace":5}`, 400, "BAD_REQUEST", "namespace is a JSON number"},
			{"POST", "/v1/memory.set", `{"namespace":"n"`, 400, "BAD_REQUEST", "ends in the middle"},
			{"POST", "/v1/memory.set", `{"nope":1}`, 400, "BAD_REQUEST", `unknown field "nope"`},
			{"POST", "/v1/memory.set", `{"namespace":"n","key":"k"}`, 400, "BAD_REQUEST", "n/k has no value"},
			{"POST", "/v1/memory.set", `{"namespace":"n","key":"k","value":` + big + `}`, 413, "TOO_LARGE", "at most 1048576"},
			{"POST", "/v1/memory.set", strings.Repeat(" ", 16<<20+1), 413, "TOO_LARGE", "16777216"},
			{"GET", "/v1/memory.set", "", 405, "METHOD_NOT_ALLOWED", "want POST"},
			{"POST", "/v1/nothing", "", 404, "NO_SUCH_CALL", ""},
		} {
			status, code, detail := ask(c.method, c.path, c.body)
			if status != c.status || code != c.code || !strings.Contains(detail, c.detail) {
				t.Errorf("%s %s %.20q: %d %s %q", c.method, c.path, c.body, status, code, detail)
			}
			for _, leak := range []string{"memory: ", "cells: ", "memory.Write", "EOF", "Go "} {
				if strings.Contains(detail, leak) {
					t.Errorf("%s %.20q leaks %q: %s", c.path, c.body, leak, detail)
				}
			}
		}
	})
}
