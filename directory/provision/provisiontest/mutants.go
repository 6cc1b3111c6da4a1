// SPDX-License-Identifier: Apache-2.0

package provisiontest

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/provision"
)

// mutant is a provisioner that is broken in one way.
type mutant struct {
	provision.Provisioner
	name string
}

// Mutants runs the suite against provisioners that are broken on purpose; the test
// fails if the suite passes one of them.
func Mutants(t *testing.T, newHarness func(t TB) Harness) {
	for name, cases := range map[string][]string{
		"is not there during an upgrade":  {"Upgrade"},
		"does not wait":                   {"Upgrade"},
		"makes more with each call":       {"ProvisionIsIdempotent"},
		"keeps what is retired":           {"Retire"},
		"retires all cells":               {"CellsAreApart"},
		"upgrades nothing":                {"Upgrade"},
		"takes every version":             {"BrokenVersion"},
		"checks nothing":                  {"Invalid"},
		"forgets that it drains":          {"Drain"},
		"keeps the environment":           {"UpgradeOfEnvironment"},
		"never makes a cell smaller":      {"UpgradeOfReplicas"},
		"is at the spec's generation yet": {"Upgrade"},
	} {
		t.Run(name, func(t *testing.T) {
			for _, c := range Cases() {
				if !slices.Contains(cases, c.Name) {
					continue
				}
				r := &recorder{TB: t}
				r.run(func() {
					h := newHarness(r)
					h.Provisioner = &mutant{h.Provisioner, name}
					c.Run(r, h)
				})
				if len(r.said) > 0 {
					t.Logf("noticed by %s: %.200s", c.Name, r.said[0])
					return
				}
			}
			t.Errorf("the suite passes a provisioner that %s", name)
		})
	}
}

func (m *mutant) Provision(ctx context.Context, s provision.Spec) error {
	switch m.name {
	case "makes more with each call":
		if st, err := m.Provisioner.Status(ctx, s.Cell); err == nil && st.Replicas > 0 {
			s.Replicas++
			s.Generation++
			return m.Provisioner.Upgrade(ctx, s)
		}
	case "checks nothing":
		if s.Validate() != nil || s.Command[0] == "x" {
			return nil
		}
	}
	return m.Provisioner.Provision(ctx, s)
}

func (m *mutant) Upgrade(ctx context.Context, s provision.Spec) error {
	switch m.name {
	case "is not there during an upgrade":
		r := s.Clone()
		r.Desired = provision.DesiredRetired
		if err := m.Provisioner.Retire(ctx, r); err != nil {
			return err
		}
		<-time.After(50 * time.Millisecond) // long enough to be seen, on a busy machine too
		return m.Provisioner.Provision(ctx, s)
	case "does not wait":
		done, cancel := context.WithCancel(ctx)
		cancel()
		_ = m.Provisioner.Upgrade(done, s)
		return nil
	case "upgrades nothing":
		return nil
	case "takes every version":
		_ = m.Provisioner.Upgrade(ctx, s)
		return nil
	case "checks nothing":
		if s.Validate() != nil || s.Command[0] == "x" {
			return nil
		}
	case "keeps the environment":
		s.Env = nil
	case "never makes a cell smaller":
		if st, err := m.Provisioner.Status(ctx, s.Cell); err == nil {
			s.Replicas = max(s.Replicas, st.Replicas)
		}
	}
	return m.Provisioner.Upgrade(ctx, s)
}

func (m *mutant) Drain(ctx context.Context, s provision.Spec) error {
	if m.name == "forgets that it drains" {
		return nil
	}
	return m.Provisioner.Drain(ctx, s)
}

func (m *mutant) Retire(ctx context.Context, s provision.Spec) error {
	switch m.name {
	case "keeps what is retired":
		return nil
	case "retires all cells":
		other := s.Clone()
		other.Cell = "c2"
		if err := m.Provisioner.Retire(ctx, other); err != nil {
			return err
		}
	}
	return m.Provisioner.Retire(ctx, s)
}

func (m *mutant) Status(ctx context.Context, c cells.CellID) (provision.Status, error) {
	st, err := m.Provisioner.Status(ctx, c)
	if m.name == "is at the spec's generation yet" && st.Replicas > 0 {
		st.ObservedGeneration++
		st.Version = "v2"
	}
	return st, err
}

// recorder notes what a case says instead of failing the test.
type recorder struct {
	TB
	mu   sync.Mutex // guards said
	said []string
}

func (r *recorder) note(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.said = append(r.said, fmt.Sprintf(format, args...))
}

func (r *recorder) Errorf(format string, args ...any) { r.note(format, args...) }

func (r *recorder) Fatalf(format string, args ...any) {
	r.note(format, args...)
	runtime.Goexit()
}

// run runs a case that may end by Goexit.
func (r *recorder) run(f func()) {
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	<-done
}
