// SPDX-License-Identifier: Apache-2.0

package attach_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/attach"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/guard/tenancy"
)

// rows is a store of rows with one answer of its own.
type rows struct {
	tenancy.Store
	ability error
	open    []tenancy.Blocker
	set     func(mode tenancy.Mode, w tenancy.ModeWrite) (tenancy.Mode, error)
}

func (r *rows) WaitAbility(ctx context.Context) error {
	if r.ability != nil {
		return r.ability
	}
	return r.Store.WaitAbility(ctx)
}

func (r *rows) OpenBefore(ctx context.Context, snapshot string) ([]tenancy.Blocker, error) {
	if r.open != nil {
		return r.open, nil
	}
	return r.Store.OpenBefore(ctx, snapshot)
}

func (r *rows) SetMode(ctx context.Context, mode tenancy.Mode, w tenancy.ModeWrite) (tenancy.Mode, error) {
	if r.set != nil {
		return r.set(mode, w)
	}
	return r.Store.SetMode(ctx, mode, w)
}

// What the first attach makes of a mode that is not set, or perhaps, of a server that
// cannot be judged, of a prepared transaction, and of a process that falls back.
func TestFirstAttachRefusals(t *testing.T) {
	t.Parallel()
	w, one := prepared(t)
	with := func(r *rows) func(*attach.Cell) {
		r.Store = one.rows
		return func(c *attach.Cell) { c.Rows = r }
	}
	state := func(what string, mode, recorded tenancy.Mode, begun bool) {
		t.Helper()
		row := one.row("one")
		if one.state().Mode != mode || row.Mode != recorded || row.AttachStartedAt.IsZero() == begun || row.State != deploy.Attaching {
			t.Errorf("%s: %s, with the directory %s, begun %t, %s", what, one.state().Mode, row.Mode, !row.AttachStartedAt.IsZero(), row.State)
		}
	}
	_, err := one.attach(with(&rows{ability: fmt.Errorf("%w: max_prepared_transactions is 5", cells.ErrInvalid)}))
	w.refused(err, "max_prepared_transactions is 5")
	state("a server that cannot be judged", tenancy.Recording, tenancy.Recording, false)

	var deadline time.Time
	begun := time.Now()
	_, err = one.attach(with(&rows{set: func(m tenancy.Mode, w tenancy.ModeWrite) (tenancy.Mode, error) {
		deadline = w.Deadline
		return tenancy.Recording, fmt.Errorf("%w: locked", cells.ErrUnavailable)
	}}), func(c *attach.Cell) { c.Wait, c.RequestDeadline = time.Minute, 20*time.Second })
	w.refused(err, "is recording now", "run cell attach again")
	state("a mode that was not set", tenancy.Recording, tenancy.Enforced, true)
	if left := begun.Add(time.Minute).Sub(deadline); left > 21*time.Second || time.Until(deadline) > 40*time.Second {
		t.Errorf("the last try may commit %s before the end of --wait", left)
	}
	_, err = one.attach(with(&rows{set: func(tenancy.Mode, tenancy.ModeWrite) (tenancy.Mode, error) { return "", tenancy.ErrModeUnknown }}))
	if !errors.Is(err, tenancy.ErrModeUnknown) {
		t.Errorf("an unknown mode: %v", err)
	}
	w.refused(err, "goes on by the mode that it reads")

	begun = time.Now()
	_, err = one.attach(with(&rows{open: []tenancy.Blocker{{Kind: "prepared transaction", Name: "gid", Prepared: true}}}))
	w.refused(err, "prepared transaction gid", "stays enforced")
	if took := time.Since(begun); took > 25*time.Second {
		t.Errorf("a prepared transaction was waited for: %s", took)
	}
	state("a prepared transaction", tenancy.Enforced, tenancy.Enforced, true)

	f := one.fingerprint()
	_, err = one.attach(func(c *attach.Cell) {
		c.Done = func(ctx context.Context, s attach.Step) error {
			if s == attach.StepPlaced {
				return one.rows.Beat(ctx, tenancy.Heartbeat{Instance: "back", Cell: "one", Mode: tenancy.Recording, Fingerprint: &f})
			}
			return nil
		}
	})
	w.refused(err, "back (recording)", "recording again")
	state("a process that falls back", tenancy.Recording, tenancy.Enforced, true)
	w.must(one.rows.Leave(t.Context(), "back"), "its end")

	// A restore writes the highest mode that was tried, and the attach goes on from there.
	only := func(c *attach.Cell) { c.Rows = onlyRows{one.rows} }
	_, err = one.cell(only).Restore(t.Context())
	w.must(err, "restore")
	state("after a restore", tenancy.Enforced, tenancy.Enforced, true)
	var first attach.Step
	_, err = one.attach(func(c *attach.Cell) {
		c.Done = func(_ context.Context, s attach.Step) error {
			if first == "" && s != attach.StepChecked {
				first = s
			}
			return nil
		}
	})
	w.must(err, "attach")
	if first != attach.StepRecorded {
		t.Errorf("a resumed attach of an enforced cell began with %s", first)
	}
}
