// SPDX-License-Identifier: Apache-2.0

package load

import (
	"encoding/xml"
	"io"
	"strings"
	"testing"
	"time"
)

func TestWriteSVG(t *testing.T) {
	m := &PauseMatrix{}
	for _, store := range []string{"sqlite", "postgres"} {
		for _, rows := range []int{1000, 100000} {
			for _, rate := range []float64{10, 0} {
				m.Cells = append(m.Cells, PauseCell{Store: store, Rows: rows, Rate: rate, Clients: []time.Duration{time.Millisecond, 30 * time.Millisecond, time.Duration(rows) * time.Microsecond}, Clean: true})
			}
		}
	}
	m.Cells = append(m.Cells, PauseCell{Store: "postgres", Rows: 1_000_000, Rate: 10, Clean: true}) // nobody waited
	var b strings.Builder
	if err := m.WriteSVG(&b); err != nil {
		t.Fatal(err)
	}
	elements := map[string]int{}
	for d := xml.NewDecoder(strings.NewReader(b.String())); ; {
		tok, err := d.Token()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatalf("%v, in:\n%s", err, b.String())
		}
		if e, ok := tok.(xml.StartElement); ok {
			elements[e.Name.Local]++
		}
	}
	if elements["circle"] != 8 || elements["polyline"] != 4 {
		t.Errorf("%v, of 8 cells with waits and 4 lines", elements)
	}
	if strings.Contains(b.String(), "NaN") || strings.Contains(b.String(), "Inf") || !m.Clean() {
		t.Error(b.String())
	}
	one := &PauseMatrix{Cells: m.Cells[:1]}
	b.Reset()
	if err := one.WriteSVG(&b); err != nil || strings.Contains(b.String(), "NaN") {
		t.Errorf("one cell: %v\n%s", err, b.String())
	}
}

// TestTimetable: requests come as often as was asked for, and those that were held up are
// made up for, up to a second's worth.
func TestTimetable(t *testing.T) {
	due := timetable{every: 10 * time.Millisecond, next: time.Now().Add(-500 * time.Millisecond)}
	began, n := time.Now(), 0
	for ; n < 55; n++ {
		if !due.wait(t.Context()) {
			t.Fatal("ended")
		}
	}
	if took := time.Since(began); took < 30*time.Millisecond {
		t.Errorf("%d requests in %v: 50 were late, 5 were not due", n, took)
	}
	due.next = time.Now().Add(-time.Hour)
	if due.wait(t.Context()); time.Until(due.next) < -time.Second {
		t.Errorf("an hour is made up for: the next is due %v ago", -time.Until(due.next))
	}
}
