// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"
)

// The programs that a measurement starts are this test's own binary.
func TestMain(m *testing.M) {
	if os.Getenv("EDGEBENCH_PROGRAM") != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// Every kind of measurement, small, with the proxies that need no installation.
func TestMeasure(t *testing.T) {
	t.Setenv("EDGEBENCH_PROGRAM", "1")
	for kind, cases := range map[string]string{"http": "get-200 get-64k post-1k", "grpc": "grpc-unary grpc-stream-8m", "tls": "tls-get-200 tls-handshake"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			var out bytes.Buffer
			if err := run(t.Context(), []string{kind, "--rounds", "1", "--requests", "60", "--conns", "4", "--peers", "edge,reverseproxy", "--json"}, &out); err != nil {
				t.Fatal(err)
			}
			var res results
			if err := json.Unmarshal(out.Bytes(), &res); err != nil {
				t.Fatal(err)
			}
			var names []string
			for _, c := range res.Cases {
				names = append(names, c.Case)
				for _, p := range c.Peers {
					if p.CPUMicros <= 0 || p.Rate <= 0 || p.P50Micros <= 0 || p.P99Micros < p.P50Micros {
						t.Errorf("%s, %s: %+v", c.Case, p.Peer, p)
					}
					if ratio := p.EdgeCPU > 0; ratio == (p.Peer == "edge") {
						t.Errorf("%s, %s: the edge's CPU by its own is %g", c.Case, p.Peer, p.EdgeCPU)
					}
				}
			}
			if got := strings.Join(names, " "); got != cases {
				t.Errorf("measured %q, want %q", got, cases)
			}
		})
	}
}

// A wrong answer is no measurement.
func TestGeneratorChecks(t *testing.T) {
	for _, c := range []struct {
		name    string
		handler http.HandlerFunc
		want    string // "" is good
	}{
		{"good", func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, strings.Repeat("x", smallBytes))
		}, ""},
		{"short", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "x") }, "1 bytes, want 200"},
		{"status", func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusBadGateway)
			_, _ = io.WriteString(w, strings.Repeat("x", smallBytes))
		}, "502"},
		{"cut", func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, "closed"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := httptest.NewServer(c.handler)
			defer s.Close()
			g, err := newGenerator(load{port: s.Listener.Addr().(*net.TCPAddr).Port, conns: 2, requests: requestsOf("POST", pathPost, postBytes), bytes: smallBytes})
			if err != nil {
				t.Fatal(err)
			}
			defer g.close()
			res, err := g.run(20)
			switch {
			case c.want == "" && (err != nil || res.requests != 20 || res.latency.n != 20):
				t.Errorf("%+v, %v", res, err)
			case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
				t.Errorf("error %v, want one that says %q", err, c.want)
			}
		})
	}
}

func TestHistogram(t *testing.T) {
	var h histogram
	for i := 1; i <= 1000; i++ {
		h.add(time.Duration(i) * time.Microsecond)
	}
	for q, want := range map[float64]time.Duration{0.5: 500 * time.Microsecond, 0.99: 990 * time.Microsecond, 1: time.Millisecond} {
		if got := h.quantile(q); got < want || got > want+want/32 {
			t.Errorf("quantile %g is %v, want about %v", q, got, want)
		}
	}
	for _, v := range []uint64{0, 1, 63, 64, 65, 127, 128, 129, 1000, 1 << 20, 1<<40 + 12345, 1<<63 - 1} {
		if i := bucketOf(v); bucketTop(i) < v || i > 0 && bucketTop(i-1) >= v {
			t.Errorf("%d is in bucket %d, up to %d, behind one up to %d", v, i, bucketTop(i), bucketTop(max(i-1, 0)))
		}
	}
}

func TestMedian(t *testing.T) {
	odd, even := []float64{3, 1, 2}, []float64{4, 1, 2, 3}
	if got := median(3, func(i int) float64 { return odd[i] }); got != 2 {
		t.Error(got)
	}
	if got := median(4, func(i int) float64 { return even[i] }); got != 2.5 {
		t.Error(got)
	}
}
