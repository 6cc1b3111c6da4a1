// SPDX-License-Identifier: Apache-2.0

package guard_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
)

func TestErrorsSayWhatToDo(t *testing.T) {
	fenced := fmt.Errorf("tenant a: %w", cells.ErrFenced)
	for _, c := range []struct {
		err                      error
		nothing, elsewhere, here bool
	}{
		{nil, false, false, false},
		{fenced, true, true, false},
		{guard.ErrNoAdmission, true, false, false},
		{guard.ErrContended, true, false, true},
		{fmt.Errorf("%w: %w", guard.ErrCommitUnknown, guard.ErrContended), false, false, false},
		{fmt.Errorf("%w: %w", guard.ErrCommitUnknown, fenced), false, false, false},
		{cells.ErrUnavailable, true, false, false},
		{errors.New("fn's own"), true, false, false},
	} {
		if guard.NothingWritten(c.err) != c.nothing || guard.RetryElsewhere(c.err) != c.elsewhere || guard.RetryHere(c.err) != c.here {
			t.Errorf("%v: nothing written %t, elsewhere %t, here %t", c.err, guard.NothingWritten(c.err), guard.RetryElsewhere(c.err), guard.RetryHere(c.err))
		}
	}
}

func TestAdmissionFrom(t *testing.T) {
	ctx := t.Context()
	if _, err := guard.AdmissionFrom(ctx, true); !errors.Is(err, guard.ErrNoAdmission) || !errors.Is(err, cells.ErrFenced) {
		t.Errorf("none: %v", err)
	}
	alone := guard.WithTenant(ctx, "a")
	if _, err := guard.AdmissionFrom(alone, false); !errors.Is(err, guard.ErrNoAdmission) {
		t.Errorf("a tenant in a cell: %v", err)
	}
	if a, err := guard.AdmissionFrom(alone, true); err != nil || a != (guard.Admission{Tenant: "a"}) {
		t.Errorf("a tenant without cells: %+v, %v", a, err)
	}
	gate := cells.ContextWithAdmission(alone, &cells.Admission{Tenant: "b", Cell: "c", Epoch: 3})
	for _, without := range []bool{false, true} {
		if a, err := guard.AdmissionFrom(gate, without); err != nil || a != (guard.Admission{Tenant: "b", Cell: "c", Epoch: 3}) {
			t.Errorf("the gate's: %+v, %v", a, err)
		}
	}
	own := guard.ContextWith(gate, guard.Admission{Tenant: "d", Epoch: 9})
	if a, err := guard.AdmissionFrom(own, false); err != nil || a != (guard.Admission{Tenant: "d", Epoch: 9}) {
		t.Errorf("an explicit one: %+v, %v", a, err)
	}
}

func events(tenant cells.TenantID, from, to cells.EventSeq) (out []guard.Event) {
	for seq := from; seq <= to; seq++ {
		out = append(out, guard.Event{Tenant: tenant, Seq: seq, ID: fmt.Sprint(tenant, seq), Type: "put"})
	}
	return out
}

func TestLocal(t *testing.T) {
	var l guard.Local
	var all, one []cells.EventSeq
	fail := cells.EventSeq(0)
	refused := errors.New("refused")
	l.Subscribe("", func(_ context.Context, e guard.Event) error {
		if e.Seq == fail {
			return refused
		}
		all = append(all, e.Seq)
		return nil
	})
	stop := l.Subscribe("a", func(_ context.Context, e guard.Event) error { one = append(one, e.Seq); return nil })
	if err := l.Publish(t.Context(), events("a", 1, 2)); err != nil {
		t.Fatal(err)
	}
	if err := l.Publish(t.Context(), events("b", 7, 7)); err != nil {
		t.Fatal(err)
	}
	fail = 4
	err := l.Publish(t.Context(), events("a", 3, 5))
	if !errors.Is(err, refused) || guard.Accepted(err, 3) != 1 {
		t.Errorf("a subscriber that fails: %v, accepted %d", err, guard.Accepted(err, 3))
	}
	stop()
	fail = 0
	if err := l.Publish(t.Context(), events("a", 4, 5)); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(all, []cells.EventSeq{1, 2, 7, 3, 4, 5}) || !slices.Equal(one, []cells.EventSeq{1, 2, 3}) {
		t.Errorf("delivered %v and %v", all, one)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(refused)
	if err := l.Publish(ctx, events("a", 6, 6)); !errors.Is(err, refused) {
		t.Errorf("a context that has ended: %v", err)
	}
}

func TestPublishers(t *testing.T) {
	refused := errors.New("refused")
	for _, c := range []struct {
		accept []int // by each publisher; 5 is all
		got    []int // what each is given
		want   int
	}{
		{[]int{5, 5}, []int{5, 5}, 5},
		{[]int{3, 5}, []int{5, 3}, 3},
		{[]int{5, 2, 5}, []int{5, 5, 2}, 2},
		{[]int{3, 1}, []int{5, 3}, 1},
		{[]int{0, 5}, []int{5, 0}, 0},
		{nil, nil, 5},
	} {
		got := make([]int, len(c.accept))
		var ps []guard.Publisher
		for i, n := range c.accept {
			ps = append(ps, guard.PublisherFunc(func(_ context.Context, events []guard.Event) error {
				got[i] = len(events)
				if n < len(events) {
					return &guard.PartialError{Accepted: n, Err: refused}
				}
				return nil
			}))
		}
		err := guard.Publishers(ps...).Publish(t.Context(), events("a", 1, 5))
		if n := guard.Accepted(err, 5); n != c.want || (err == nil) != (c.want == 5) {
			t.Errorf("%v: accepted %d, %v, want %d", c.accept, n, err, c.want)
		}
		if !slices.Equal(got, c.got) && len(c.got) > 0 {
			t.Errorf("%v: given %v, want %v", c.accept, got, c.got)
		}
	}
	if n := guard.Accepted(&guard.PartialError{Accepted: 9}, 5); n != 5 {
		t.Errorf("more than there were: %d", n)
	}
	if n := guard.Accepted(&guard.PartialError{Accepted: -1}, 5); n != 0 {
		t.Errorf("less than none: %d", n)
	}
}
