// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// Severity says how bad a finding is.
type Severity string

const (
	// Error: requests are refused, data is at risk, or a rule of isolation does not hold.
	Error Severity = "error"
	// Warning: it will become an error, costs room, or takes away a protection.
	Warning Severity = "warning"
	// Note: worth knowing; asks for nothing, and does not change [Report.Exit].
	Note Severity = "note"
)

// Outcome is what became of a check.
type Outcome string

const (
	OK     Outcome = "ok"
	Found  Outcome = "finding"
	NotRun Outcome = "not run"
)

// Scope is what a check is about.
type Scope string

const (
	// ScopeFleet: a directory, its cells and routers.
	ScopeFleet Scope = "fleet"
	// ScopeDeployments: whole deployments that are cells, and their directory.
	ScopeDeployments Scope = "deployments"
	// ScopeFiles: files on this machine.
	ScopeFiles Scope = "files"
)

// Finding is one thing that is wrong.
type Finding struct {
	Severity Severity       `json:"severity"`
	Cell     cells.CellID   `json:"cell,omitempty"`
	Tenant   cells.TenantID `json:"tenant,omitempty"`
	// Message says what was found, Fix what to do.
	Message string `json:"message"`
	Fix     string `json:"fix"`
}

// Result is what one check found.
type Result struct {
	Check   string  `json:"check"`
	Outcome Outcome `json:"outcome"`
	// Reason says why the check was not run, or what it could not see beside its findings.
	Reason   string    `json:"reason,omitempty"`
	Findings []Finding `json:"findings,omitempty"`
	// More counts findings beyond [MaxFindings].
	More int `json:"more,omitempty"`
}

// MaxFindings bounds the findings of one check that a report lists.
const MaxFindings = 50

// Check is one of the doctor's checks.
type Check struct {
	ID    string
	Scope Scope
	// Looks says what it looks at and what it calls a fault; Worst how bad that is; Fix
	// what to do about it.
	Looks string
	Worst Severity
	Fix   string
	run   func(ctx context.Context, x *exam) ([]Finding, error)
}

// Report is the results of an examination, in the order of [Checks].
type Report struct {
	At      time.Time `json:"at"`
	Results []Result  `json:"results"`
}

// Exit is the exit code: 1 when there is an error or a warning, else 2 when a check
// was not run, else 0.
func (r *Report) Exit() int {
	code := 0
	for _, q := range r.Results {
		if q.Outcome == NotRun && code == 0 {
			code = 2
		}
		if slices.ContainsFunc(q.Findings, func(f Finding) bool { return f.Severity != Note }) {
			code = 1
		}
	}
	return code
}

// Result returns the result of a check, or nil.
func (r *Report) Result(id string) *Result {
	for i := range r.Results {
		if r.Results[i].Check == id {
			return &r.Results[i]
		}
	}
	return nil
}

// Options of an examination; the zero value is usable.
type Options struct {
	// Only names the checks to run; none means all whose scope has sources.
	Only []string
	// Grace is for how long what moves leave may lie around after it could have been
	// removed. Default 5 minutes; negative is none.
	Grace time.Duration
	// Lag is how long a router or a process may take to see a change. Default 5 s.
	Lag time.Duration
	// Expiry is how long before its end a certificate is a finding. Default 14 days.
	Expiry time.Duration
	// DefaultShare is the share of tenants without a route, in the default cell, from
	// which it is a finding. Default 0.5.
	DefaultShare float64
	// Timeout bounds each check. Default 30 s.
	Timeout time.Duration
	// Now is the clock; default time.Now.
	Now func() time.Time
}

func (o *Options) complete() {
	if o.Grace == 0 {
		o.Grace = 5 * time.Minute
	}
	if o.Lag <= 0 {
		o.Lag = 5 * time.Second
	}
	if o.Expiry <= 0 {
		o.Expiry = 14 * 24 * time.Hour
	}
	if o.DefaultShare <= 0 {
		o.DefaultShare = 0.5
	}
	if o.Timeout <= 0 {
		o.Timeout = 30 * time.Second
	}
	if o.Now == nil {
		o.Now = time.Now
	}
}

// Checks lists all checks, in the order in which they are run.
func Checks() []Check {
	return slices.Concat(fileChecks(), fleetChecks(), storeChecks(), deploymentChecks(), cellChecks(), botChecks())
}

// Examine runs the checks. The error wraps [cells.ErrInvalid] when Only names a check
// that there is none of, or when there are no sources at all.
func Examine(ctx context.Context, src Sources, o Options) (Report, error) {
	o.complete()
	all := Checks()
	for _, id := range o.Only {
		if !slices.ContainsFunc(all, func(c Check) bool { return c.ID == id }) {
			return Report{}, fmt.Errorf("%w: there is no check %q", cells.ErrInvalid, id)
		}
	}
	x := &exam{src: src, o: o}
	defer x.close()
	rep := Report{At: o.Now().UTC(), Results: []Result{}}
	for _, c := range all {
		if len(o.Only) > 0 && !slices.Contains(o.Only, c.ID) || len(o.Only) == 0 && !src.has(c.Scope) {
			continue
		}
		rep.Results = append(rep.Results, x.result(ctx, c))
	}
	if len(rep.Results) == 0 {
		return rep, fmt.Errorf("%w: there is nothing to examine", cells.ErrInvalid)
	}
	return rep, nil
}

func (x *exam) result(ctx context.Context, c Check) Result {
	ctx, cancel := context.WithTimeout(ctx, x.o.Timeout)
	defer cancel()
	r := Result{Check: c.ID, Outcome: OK}
	if !x.src.has(c.Scope) {
		r.Outcome, r.Reason = NotRun, fmt.Sprintf("nothing of scope %s was given to look at", c.Scope)
		return r
	}
	found, err := c.run(ctx, x)
	if err != nil {
		r.Reason = reason(err)
	}
	switch {
	case len(found) > 0:
		r.Outcome = Found
	case err != nil:
		r.Outcome = NotRun
	}
	for i := range found {
		if found[i].Severity == "" {
			found[i].Severity = c.Worst
		}
		if found[i].Fix == "" {
			found[i].Fix = c.Fix
		}
	}
	slices.SortStableFunc(found, func(a, b Finding) int {
		return strings.Compare(string(a.Cell)+"\x00"+string(a.Tenant), string(b.Cell)+"\x00"+string(b.Tenant))
	})
	if n := len(found) - MaxFindings; n > 0 {
		found, r.More = found[:MaxFindings], n
	}
	r.Findings = found
	return r
}

// reason is an error in one line, each joined error once.
func reason(err error) string {
	var lines []string
	for l := range strings.Lines(err.Error()) {
		if l = strings.TrimSpace(l); l != "" && !slices.Contains(lines, l) {
			lines = append(lines, l)
		}
	}
	return strings.ReplaceAll(strings.Join(lines, "; "), cells.ErrUnavailable.Error()+": ", "")
}

// errNotGiven: nobody said where a source is.
var errNotGiven = errors.New("not given")
