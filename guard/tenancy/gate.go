// SPDX-License-Identifier: Apache-2.0

package tenancy

import (
	"fmt"
	"strings"

	"github.com/cloister-dev/cloister/cells"
)

// Reason says why a process is gated: it answers nothing but health and the probe,
// is unready and runs no worker. The zero value is a process that is not gated.
type Reason struct {
	// Code is for programs, one of the constants below.
	Code string
	// Text is for people: it names the setting or the command that helps, and
	// nothing secret.
	Text string
}

// The codes of reasons.
const (
	ReasonUnread      = "unread"      // the rows were never read, or too long ago
	ReasonPartial     = "partial"     // some rows of the state are missing
	ReasonUnprepared  = "unprepared"  // CELL is set and there are no rows
	ReasonOtherCell   = "other-cell"  // the first row names another cell
	ReasonFingerprint = "fingerprint" // the configuration matches neither value
	ReasonNoCell      = "cell-unset"  // CELL is not set on a cell that checks
)

// Gated reports whether there is a reason.
func (r Reason) Gated() bool { return r.Code != "" }

// Unread is the reason of a process that has no rows to judge by.
func Unread(detail string) Reason {
	return Reason{Code: ReasonUnread, Text: "the cell's own rows could not be read: " + detail}
}

// Gate judges a process by rows that were read. cell is the process's CELL, "" when
// it is not set; process is its configuration's fingerprint, which only counts when
// it is.
func Gate(r Rows, cell cells.CellID, process Fingerprint) Reason {
	state := r.State()
	if state == StatePartial {
		text := "the cell's own rows are incomplete (missing: " + strings.Join(r.Missing(), ", ") + "); run cell prepare again, or cell restore after a restore"
		if cell == "" {
			text += "; CELL is not set"
		}
		return Reason{Code: ReasonPartial, Text: text}
	}
	if cell == "" {
		if state == StateEnforced {
			return Reason{Code: ReasonNoCell, Text: fmt.Sprintf("the stores are those of cell %s, and CELL is not set; set it to the cell's name", r.First.Cell)}
		}
		return Reason{}
	}
	switch {
	case state == StateOpen:
		return Reason{Code: ReasonUnprepared, Text: fmt.Sprintf("CELL is %s and the stores are no cell's (no mode row); run cell prepare", cell)}
	case r.First.Cell != cell:
		return Reason{Code: ReasonOtherCell, Text: fmt.Sprintf("CELL is %s and the stores are those of cell %s", cell, r.First.Cell)}
	case r.Self.Match(process) == MatchNone:
		text := "the configuration matches no value of the cell's own row"
		if r.Self.Current != nil {
			text += " (" + strings.Join(process.Differs(*r.Self.Current), ", ") + ")"
		}
		return Reason{Code: ReasonFingerprint, Text: text + "; see cell update"}
	}
	return Reason{}
}
