// SPDX-License-Identifier: Apache-2.0

package transfertest

import (
	"context"
	"errors"
	"fmt"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// viewing is a source that says when a view is asked for, and has none after an error.
type viewing struct {
	transfer.Source
	before func() error
}

func (v viewing) View(ctx context.Context, m cells.MoveRef) (transfer.View, error) {
	if err := v.before(); err != nil {
		return nil, err
	}
	return v.Source.View(ctx, m)
}

// testSettled changes ten rows after both sides were compared: they are compared again
// before the cut, while changes go on being applied. Of what was equal then only what
// changes later is compared in the cut, and what was not, is.
func testSettled(tb TB, h Harness) {
	const damage = "UPDATE item SET body = 'almost' WHERE tenant = ?1 AND id = ?2"
	for _, c := range []struct {
		name string
		// settling is damaged while the keys are compared, later is changed once they
		// were and damaged in the cut.
		settling, later string
		// blind: the source has no view for it.
		blind bool
	}{
		{name: "nothing is damaged"},
		{name: "damaged when it is compared before the cut", settling: "k00007"},
		{name: "damaged after it was, and has changed again", later: "k00001"},
		{name: "there is no view", blind: true},
	} {
		w := newWorld(tb, h)
		w.fill(20)
		m := w.move("m1")
		spoil := func(id string) error {
			if id == "" {
				return nil
			}
			return w.b.Raw(tb.Context(), w.tenant, func(x Exec) error { return x(damage, string(w.tenant), id) })
		}
		var verified, settled, compared bool
		v := h.agent(tb, w.b, transfer.WithTouchedLimit(0), transfer.WithFault(func(point string) error {
			switch {
			case point == "verified" && !verified:
				verified = true
				w.write(func(x Exec) (err error) {
					for i := 1; i <= 10 && err == nil; i++ {
						err = putItem(x, w.tenant, fmt.Sprintf("k%05d", i), int64(100+i))
					}
					return err
				})
			case point == "settled":
				settled = true
			case point == "prepared" && c.later != "":
				w.write(func(x Exec) error { return putItem(x, w.tenant, c.later, 300) })
			case point == "applied":
				return spoil(c.later)
			}
			return nil
		}))
		src := viewing{w.a.Source(), func() error {
			if !verified || compared {
				return nil
			}
			compared = true
			if c.blind {
				return fmt.Errorf("%w: too many views", cells.ErrUnavailable)
			}
			// Neither applied yet nor before the view.
			w.write(func(x Exec) error { return putItem(x, w.tenant, "k00003", 200) })
			w.must(spoil(c.settling))
			return nil
		}}
		_, err := v.Prepare(tb.Context(), m, src, nil)
		w.must(err)
		if !compared || settled == c.blind {
			tb.Fatalf("%s: nothing was compared before the cut: %t, something was settled: %t", c.name, !compared, settled)
		}
		mark, err := w.cut(v, m, src)
		if c.settling+c.later != "" {
			w.wantErr(c.name, err, transfer.ErrMismatch)
			continue
		}
		w.must(err)
		w.proved(v, m, mark)
		w.same()
		w.bystandersUntouched()
	}
}

// settlesAll takes all keys for equal.
type settlesAll struct{ transfer.Import }

func (s *settlesAll) Settle(ctx context.Context, _ []transfer.KeySet, compared []cells.Comparison) error {
	sets, err := s.Import.Touched(ctx, 1000)
	return errors.Join(err, s.Import.Settle(ctx, sets, compared))
}

// settlesForEver does not notice that a key has changed again.
type settlesForEver struct {
	transfer.Import
	done bool
}

func (s *settlesForEver) Settle(ctx context.Context, sets []transfer.KeySet, compared []cells.Comparison) error {
	s.done = true
	return s.Import.Settle(ctx, sets, compared)
}

func (s *settlesForEver) Touched(ctx context.Context, perSet int) ([]transfer.KeySet, error) {
	if s.done {
		return nil, nil
	}
	return s.Import.Touched(ctx, perSet)
}
