// SPDX-License-Identifier: Apache-2.0

package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// pollPatience is how long a directory may be out of reach before a poll gives up.
const pollPatience = 30 * time.Second

// poll reads a record now and every so often and shows it to see, until see says that
// it is done or returns an error, which is returned. A directory that cannot be
// reached is asked again, for pollPatience; then the error wraps [ErrWatchBroken] and
// names what was watched. Other refusals of the directory end it at once.
func poll[T any](ctx context.Context, every time.Duration, what string, read func(context.Context) (T, error), see func(T) (done bool, err error)) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	failures := 0
	for {
		rec, err := read(ctx)
		switch a := cells.AnswerOf(err); {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case a != nil && a.Code != cells.CodeBackendUnavailable:
			return a
		case err != nil:
			if failures++; failures > int(pollPatience/every) {
				return fmt.Errorf("%w: %s: %w", ErrWatchBroken, what, err)
			}
		default:
			failures = 0
			if done, err := see(rec); done || err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}

// changesNothing is the error of a call that changes nothing: its outcome is not unknown.
func changesNothing(err error) error {
	var u *UnknownOutcomeError
	if errors.As(err, &u) {
		return u.Err
	}
	return err
}
