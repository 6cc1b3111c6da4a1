// SPDX-License-Identifier: Apache-2.0

package tenancy

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cloister-dev/cloister/cells"
)

// fieldOf is a fingerprint with one field.
func fieldOf(field string, values ...string) Fingerprint {
	return Fingerprint{Schema: 1, Fields: map[Field][]string{field: values}}
}

// Every combination of rows is in exactly the state that the rule says. The table
// is written out: first absent, true or false; mode absent, recording or enforced;
// self absent or present; any tenancy row or none.
func TestStateOfEveryCombination(t *testing.T) {
	const table = `
first mode      self tenancy  state
-     -         -    -        open
-     -         -    yes      partial
-     -         yes  -        partial
-     -         yes  yes      partial
-     recording -    -        partial
-     recording -    yes      partial
-     recording yes  -        partial
-     recording yes  yes      partial
-     enforced  -    -        partial
-     enforced  -    yes      partial
-     enforced  yes  -        partial
-     enforced  yes  yes      partial
true  -         -    -        partial
true  -         -    yes      partial
true  -         yes  -        partial
true  -         yes  yes      partial
true  recording -    -        partial
true  recording -    yes      partial
true  recording yes  -        recording
true  recording yes  yes      recording
true  enforced  -    -        partial
true  enforced  -    yes      partial
true  enforced  yes  -        enforced
true  enforced  yes  yes      enforced
false -         -    -        partial
false -         -    yes      partial
false -         yes  -        partial
false -         yes  yes      partial
false recording -    -        partial
false recording -    yes      partial
false recording yes  -        enforced
false recording yes  yes      enforced
false enforced  -    -        partial
false enforced  -    yes      partial
false enforced  yes  -        enforced
false enforced  yes  yes      enforced`
	self := &Self{Current: ptr(fieldOf("hosts", "a"))}
	n := 0
	for _, line := range strings.Split(strings.TrimSpace(table), "\n")[1:] {
		f := strings.Fields(line)
		n++
		r := Rows{AnyTenancy: f[3] == "yes"}
		if f[0] != "-" {
			r.First = &First{First: f[0] == "true", Cell: "a"}
		}
		if f[1] != "-" {
			r.Mode = Mode(f[1])
		}
		if f[2] == "yes" {
			r.Self = self
		}
		want := State(f[4])
		if got := r.State(); got != want {
			t.Errorf("%s: %s", line, got)
		}
		wantMode := map[State]Mode{StateOpen: "", StateRecording: Recording}
		mode, ok := wantMode[want]
		if !ok {
			mode = Enforced
		}
		if got := r.EffectiveMode(); got != mode {
			t.Errorf("%s: effective mode %q", line, got)
		}
		if (len(r.Missing()) > 0) != (want == StatePartial) {
			t.Errorf("%s: missing %v", line, r.Missing())
		}
		if odd := r.Odd() != ""; odd != (f[0] == "false" && f[1] == "recording") {
			t.Errorf("%s: odd %q", line, r.Odd())
		}
		// The gate: who is not told its cell serves in open and recording only; who is
		// told serves in recording and enforced, with the right name and configuration.
		for _, c := range []struct {
			cell cells.CellID
			fp   Fingerprint
			ok   bool
			code string
		}{
			{"", Fingerprint{}, want == StateOpen || want == StateRecording, ReasonNoCell},
			{"", fieldOf("hosts", "a"), want == StateOpen || want == StateRecording, ReasonNoCell},
			{"a", fieldOf("hosts", "a"), want == StateRecording || want == StateEnforced, ReasonUnprepared},
			{"a", fieldOf("hosts", "b"), false, ReasonFingerprint},
			{"b", fieldOf("hosts", "a"), false, ReasonOtherCell},
		} {
			reason := Gate(r, c.cell, c.fp)
			if reason.Gated() == c.ok {
				t.Errorf("%s: CELL %q with %v: %+v", line, c.cell, c.fp.Fields, reason)
			}
			if c.ok {
				continue
			}
			code := c.code
			switch {
			case want == StatePartial:
				code = ReasonPartial
			case want == StateOpen:
				code = ReasonUnprepared
			}
			if reason.Code != code {
				t.Errorf("%s: CELL %q: reason %s, want %s", line, c.cell, reason.Code, code)
			}
			if c.cell == "" && !strings.Contains(reason.Text, "CELL") {
				t.Errorf("%s: the reason does not name the setting: %s", line, reason.Text)
			}
		}
	}
	if n != 3*3*2*2 {
		t.Fatalf("%d combinations", n)
	}
}

func ptr[T any](v T) *T { return &v }

// A mode that nobody writes counts as enforced.
func TestUnknownModeIsEnforced(t *testing.T) {
	r := Rows{Mode: "relaxed", First: &First{First: true, Cell: "a"}, Self: &Self{Current: ptr(fieldOf("hosts"))}}
	if r.State() != StateEnforced || Mode("relaxed").Validate() == nil {
		t.Fatal(r.State())
	}
}

func TestSelfMatch(t *testing.T) {
	old, next := fieldOf("hosts", "a"), fieldOf("hosts", "b")
	both := Fingerprint{Schema: 1, Fields: map[Field][]string{}}
	self := &Self{Current: &old, Next: &next}
	for _, c := range []struct {
		self *Self
		fp   Fingerprint
		want Match
	}{
		{self, old, MatchCurrent}, {self, next, MatchNext}, {self, fieldOf("hosts", "c"), MatchNone}, {self, both, MatchBoth},
		{nil, old, MatchNone}, {&Self{Current: &old}, next, MatchNone}, {&Self{}, both, MatchNone},
	} {
		if got := c.self.Match(c.fp); got != c.want {
			t.Errorf("%v in %+v: %q, want %q", c.fp, c.self, got, c.want)
		}
	}
}

func TestMatching(t *testing.T) {
	fp := func(pairs ...string) Fingerprint {
		f := Fingerprint{Schema: 1, Fields: map[Field][]string{}}
		for i := 0; i < len(pairs); i += 2 {
			f.Fields[pairs[i]] = []string{}
			if pairs[i+1] != "" {
				f.Fields[pairs[i]] = strings.Split(pairs[i+1], ",")
			}
		}
		return f
	}
	for _, c := range []struct {
		process, value Fingerprint
		want           bool
	}{
		{fp("hosts", "a"), fp("hosts", "a"), true},
		{fp("hosts", "a"), fp("hosts", "b"), false},
		{fp("hosts", "a"), fp("hosts", ""), false},
		{fp("hosts", ""), fp("hosts", "a"), false},
		{fp("hosts", "a,b"), fp("hosts", "b,a,a"), true},
		{fp("hosts", "a,b"), fp("hosts", "a"), false},
		// The value lacks a field of the newer process: good only at its default.
		{fp("hosts", "a", "new", ""), fp("hosts", "a"), true},
		{fp("hosts", "a", "new", "x"), fp("hosts", "a"), false},
		// The older process lacks a field of the newer value.
		{fp("hosts", "a"), fp("hosts", "a", "new", "x"), true},
		{fp("hosts", "b"), fp("hosts", "a", "new", "x"), false},
	} {
		if got := c.process.Matches(c.value); got != c.want {
			t.Errorf("%v matches %v: %v", c.process.Fields, c.value.Fields, got)
		}
	}
	if got := fmt.Sprint(fp("a", "1", "b", "2", "c", "3").Differs(fp("b", "2"))); got != "[a c]" {
		t.Error(got)
	}
	stores := func(id, bucket, prefix string) Fingerprint {
		return fp("deployment_id", id, "bucket", bucket, "prefix", prefix)
	}
	if !stores("1", "", "").SameStores(fp("deployment_id", "1", "hosts", "x")) || stores("1", "b", "").SameStores(fp("deployment_id", "1")) {
		t.Error("stores are compared at their defaults")
	}
}
