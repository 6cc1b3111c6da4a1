// SPDX-License-Identifier: Apache-2.0

package vitals_test

import (
	"encoding/json"
	"errors"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/vitals"
)

func TestHistogram(t *testing.T) {
	var h vitals.Histogram
	if h.Quantile(0.99) != 0 || h.Total() != 0 {
		t.Errorf("empty: %v, %d", h.Quantile(0.99), h.Total())
	}
	for range 98 {
		h.Add(time.Millisecond)
	}
	h.Add(100 * time.Millisecond)
	h.Add(time.Hour)
	if h.Total() != 100 {
		t.Errorf("total %d", h.Total())
	}
	if p50, p99, p100 := h.Quantile(0.5), h.Quantile(0.99), h.Quantile(1); p50 > time.Millisecond || p99 != 128*time.Millisecond || p100 <= time.Minute {
		t.Errorf("p50 %v, p99 %v, p100 %v", p50, p99, p100)
	}
	for _, c := range []struct {
		above time.Duration
		want  int64
	}{{0, 2}, {time.Millisecond, 2}, {1001 * time.Microsecond, 2}, {96 * time.Millisecond, 2}, {100 * time.Millisecond, 1}, {2 * time.Hour, 0}} {
		if got := h.Above(c.above); got != c.want {
			t.Errorf("%d above %v, want %d", got, c.above, c.want)
		}
	}
	b := vitals.Bounds()
	for i := 1; i < len(b); i++ {
		if b[i] <= b[i-1] {
			t.Errorf("bound %d is %v after %v", i, b[i], b[i-1])
		}
	}
}

// A sum minus a part is the rest; nothing is lost on the wire; what can be true is
// valid.
func TestCountsProperties(t *testing.T) {
	gen := rapid.Custom(func(t *rapid.T) vitals.Counts {
		c := vitals.Counts{Failed: rapid.Int64Range(0, 50).Draw(t, "failed"), Refused: rapid.Int64Range(0, 50).Draw(t, "refused")}
		for range rapid.IntRange(0, 60).Draw(t, "answered") {
			c.Latency.Add(time.Duration(rapid.Int64Range(0, int64(2*time.Minute)).Draw(t, "took")))
		}
		c.Requests = c.Bad() + c.Latency.Total() + rapid.Int64Range(0, 20).Draw(t, "streams")
		return c
	})
	rapid.Check(t, func(t *rapid.T) {
		a, b := gen.Draw(t, "a"), gen.Draw(t, "b")
		if got := a.Plus(b).Minus(b); got != a {
			t.Fatalf("%+v + %+v - the latter is %+v", a, b, got)
		}
		if got := b.Minus(a.Plus(b)); got != (vitals.Counts{}) {
			t.Fatalf("less than nothing: %+v", got)
		}
		if err := a.Validate(); err != nil {
			t.Fatal(err)
		}
		text, err := json.Marshal(a)
		var back vitals.Counts
		if err == nil {
			err = json.Unmarshal(text, &back)
		}
		if err != nil || back != a {
			t.Fatalf("%s became %+v, %v", text, back, err)
		}
		if q := a.Latency.Quantile(0.99); q < a.Latency.Quantile(0.5) {
			t.Fatalf("p99 %v below the median", q)
		}
	})
}

func TestCountsValidate(t *testing.T) {
	for _, c := range []vitals.Counts{
		{Requests: -1}, {Requests: 1, Failed: 2}, {Requests: 1, Failed: 1, Refused: 1}, {Requests: 1, Refused: -1},
		{Requests: 1, Latency: vitals.Histogram{2}}, {Requests: 1, Failed: 1, Latency: vitals.Histogram{1}}, {Requests: 2, Latency: vitals.Histogram{-1}}, {Requests: 1 << 60},
	} {
		if err := c.Validate(); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%+v: %v", c, err)
		}
	}
	var h vitals.Histogram
	for _, text := range []string{`"x"`, `[1.5]`, `[0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0]`} {
		if err := json.Unmarshal([]byte(text), &h); err == nil {
			t.Errorf("%s is taken", text)
		}
	}
}

func TestRecorder(t *testing.T) {
	var r vitals.Recorder
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 250 {
				r.Observe("a", "v1", vitals.Answered, 5*time.Millisecond)
				r.Observe("a", "v2", vitals.Failed, 5*time.Millisecond)
				r.Observe("a", "v2", vitals.Answered, -1)
				r.Observe("b", "v1", vitals.OfCode(cells.CodeCellUnreachable), 0)
				r.Observe("b", "v1", vitals.OfCode(cells.CodeMoving), 0)
				r.Observe("", "v1", vitals.Answered, 0)
			}
		})
	}
	wg.Wait()
	rows := r.Rows()
	if len(rows) != 3 {
		t.Fatalf("%+v", rows)
	}
	if a := rows[0]; a.Cell != "a" || a.Version != "v1" || a.Requests != 1000 || a.Bad() != 0 || a.Latency.Total() != 1000 {
		t.Errorf("%+v", a)
	}
	if a := rows[1]; a.Version != "v2" || a.Requests != 2000 || a.Failed != 1000 || a.Latency.Total() != 0 {
		t.Errorf("%+v", a)
	}
	if b := rows[2]; b.Cell != "b" || b.Requests != 1000 || b.Refused != 1000 || b.Rate() != 1 {
		t.Errorf("%+v", b)
	}
	for i := range vitals.MaxRows + 10 {
		r.Observe(cells.CellID(string(rune('a'+i%26))), time.Duration(i).String(), vitals.Answered, 0)
	}
	if n := len(r.Rows()); n > vitals.MaxRows {
		t.Errorf("%d rows", n)
	}
}

func TestOutcomes(t *testing.T) {
	for code, want := range map[int]vitals.Outcome{0: vitals.Answered, 5: vitals.Answered, 13: vitals.Failed, 14: vitals.Failed, 16: vitals.Answered} {
		if got := vitals.OfGRPC(code); got != want {
			t.Errorf("gRPC %d is %d", code, got)
		}
	}
	for status, want := range map[int]vitals.Outcome{200: vitals.Answered, 404: vitals.Answered, 499: vitals.Answered, 500: vitals.Failed, 503: vitals.Failed} {
		if got := vitals.OfStatus(status); got != want {
			t.Errorf("status %d is %d", status, got)
		}
	}
}
