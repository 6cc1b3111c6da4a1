// SPDX-License-Identifier: Apache-2.0

package spec_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// checkCampaign runs TLC on Campaign.tla: "No error", or what is violated first.
func checkCampaign(t *testing.T, items, attempts, hands int, weak string) string {
	t.Helper()
	tools := os.Getenv(envTools)
	if tools == "" {
		t.Skip("no " + envTools)
	}
	names := []string{"i1", "i2", "i3"}[:items]
	cfg := fmt.Sprintf(`CONSTANTS
    Items = {%s}
    Drivers = {d1, d2}
    Nobody = nobody
    MaxAttempts = %d
    MaxHands = %d
    Weak = {%s}
SPECIFICATION Spec
SYMMETRY Symmetry
INVARIANTS Once Truth Rest OneAttempt
CHECK_DEADLOCK FALSE
`, strings.Join(names, ", "), attempts, hands, weak)
	dir := t.TempDir()
	for name, content := range map[string]string{"Campaign.tla": read(t, "Campaign.tla"), "Check.cfg": cfg} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.CommandContext(t.Context(), "java", "-XX:+UseParallelGC", "-cp", tools, "tlc2.TLC", "-workers", "2", "-config", "Check.cfg", "Campaign.tla")
	cmd.Dir = dir
	out, runErr := cmd.CombinedOutput()
	m := verdict.FindSubmatch(out)
	if m == nil {
		t.Fatalf("TLC: %v\n%s", runErr, out)
	}
	return string(m[1]) + string(m[2])
}

func TestCampaignModel(t *testing.T) {
	if got := checkCampaign(t, 2, 2, 1, ""); got != "No error" {
		t.Errorf("%s is violated", got)
	}
}

// Each rule of campaigns that is broken lets an invariant fail.
func TestCampaignWeakenings(t *testing.T) {
	for _, c := range []struct {
		weak     string
		violated []string
	}{
		{`"resultsLookAtNoMove"`, []string{"Truth", "Rest"}},
		{`"recordsLookAtNoItem"`, []string{"Truth", "Rest"}},
		{`"recordedTwice", "recordsLookAtNoItem"`, []string{"Once", "Truth", "Rest"}},
		{`"recordedTwice"`, []string{"Once"}},
		{`"endsWhileRunning"`, []string{"Rest"}},
	} {
		t.Run(c.weak, func(t *testing.T) {
			if got := checkCampaign(t, 1, 2, 1, c.weak); !slices.Contains(c.violated, got) {
				t.Errorf("%q, want one of %v", got, c.violated)
			}
		})
	}
}
