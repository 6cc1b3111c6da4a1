// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"errors"
	"strings"

	"github.com/cloister-dev/cloister/cells"
)

// why is the reason of an outcome, and the code that goes with it.
type why struct {
	reason string
	code   cells.Code
}

// because is the reason of a move that was rolled back. What the route keeps of it is
// text, whoever reads it: a pause that did not fit is recognised by its sentinel.
func because(reason string) why {
	w := why{reason: reason}
	if strings.Contains(reason, cells.ErrBudget.Error()) {
		w.code = cells.CodeBudgetExceeded
	}
	return w
}

// refusalCode is the code of an error that has refused a move.
func refusalCode(err error) cells.Code {
	switch {
	case cells.AnswerOf(err) != nil:
	case errors.Is(err, cells.ErrUnavailable):
		return cells.CodeCellUnreachable
	case errors.Is(err, cells.ErrNotFound):
		return cells.CodeUnknownTenant
	}
	return answerOf(err).Code
}

// findingsCode is the code that a move is refused with for what its preflight has found;
// "" if nothing forbids it. The budget is asked last.
func findingsCode(list []cells.Finding) (code cells.Code) {
	for _, f := range list {
		switch {
		case f.Blocking && f.Code == cells.FindingBudget:
			code = cells.CodeBudgetExceeded
		case f.Blocking:
			return cells.CodeConflict
		}
	}
	return code
}
