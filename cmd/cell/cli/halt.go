// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"os"
	"slices"
	"strings"
	"time"
)

// haltFileHook stands still at a step that a file names, one in a line, for as long
// as it names it, and says so in <file>.reached. A test can then kill what it likes at
// exactly that point. Steps of campaigns have "campaign-" before their name, those of
// rollouts "rollout-".
func haltFileHook(file string) func(ctx context.Context, step, whose string) error {
	return func(ctx context.Context, step, whose string) error {
		named := func() bool {
			b, err := os.ReadFile(file)
			return err == nil && slices.Contains(strings.Fields(string(b)), step)
		}
		if !named() {
			return nil
		}
		if err := os.WriteFile(file+".reached", []byte(step+" "+whose), 0o600); err != nil {
			return err
		}
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for named() {
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-tick.C:
			}
		}
		return nil
	}
}
