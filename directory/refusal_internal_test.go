// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"fmt"
	"testing"

	"github.com/cloister-dev/cloister/cells"
)

// Whatever refuses a move has a code, and its dry run has the same one.
func TestRefusalCodes(t *testing.T) {
	block := cells.Finding{Code: "no_key", Blocking: true}
	budget := cells.Finding{Code: cells.FindingBudget, Blocking: true}
	note := cells.Finding{Code: "large", Note: true}
	for _, c := range []struct {
		err  error
		want cells.Code
	}{
		{&cells.PreflightError{Preflight: cells.Preflight{Findings: []cells.Finding{note, block}}}, cells.CodeConflict},
		{fmt.Errorf("x: %w", cells.ErrBudget), cells.CodeBudgetExceeded},
		{fmt.Errorf("x: %w", cells.ErrUnavailable), cells.CodeCellUnreachable},
		{cells.ErrNotFound, cells.CodeUnknownTenant},
		{cells.ErrOtherMove, cells.CodeConflict},
		{cells.ErrNotApplicable, cells.CodeConflict},
		{cells.ErrInvalid, cells.CodeBadRequest},
		{fmt.Errorf("%w: it is full", ErrCellClosed), cells.CodeCellClosed},
		{fmt.Errorf("y: %w", &cells.Answer{Code: cells.CodeForbidden}), cells.CodeForbidden},
	} {
		if got := refusalCode(c.err); got != c.want {
			t.Errorf("%v: %s, want %s", c.err, got, c.want)
		}
	}
	for _, c := range []struct {
		list []cells.Finding
		want cells.Code
	}{
		{nil, ""}, {[]cells.Finding{note}, ""}, {[]cells.Finding{budget, note}, cells.CodeBudgetExceeded}, {[]cells.Finding{budget, block}, cells.CodeConflict},
	} {
		if got := findingsCode(c.list); got != c.want {
			t.Errorf("%v: %q, want %q", c.list, got, c.want)
		}
	}
	if w := because("rolled back: " + cells.ErrBudget.Error() + ": nothing left"); w.code != cells.CodeBudgetExceeded {
		t.Errorf("a pause that did not fit: %q", w.code)
	}
	if w := because("past the drain deadline"); w.code != "" {
		t.Errorf("another reason: %q", w.code)
	}
}
