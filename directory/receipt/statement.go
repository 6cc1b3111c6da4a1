// SPDX-License-Identifier: Apache-2.0

package receipt

import (
	"errors"
	"fmt"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// Kind says what a statement is about.
type Kind string

// The first statement of a receipt is of kind outcome, and no other; nothing follows one
// of kind end.
const (
	KindOutcome Kind = "outcome"
	KindRemoval Kind = "removal"
	KindClients Kind = "clients"
	KindEnd     Kind = "end"
)

// Statement is one signed statement about a move. Durations are in nanoseconds.
type Statement struct {
	Kind Kind `json:"kind"`
	// N counts the statements of the receipt from 0; Prev is the SHA-256 of what was
	// signed before, in hexadecimal, and "" for the first.
	N    int    `json:"n"`
	Prev string `json:"prev"`
	// At is when the statement was made, by the clock of the directory By.
	At     time.Time      `json:"at"`
	By     string         `json:"by"`
	Move   cells.MoveID   `json:"move"`
	Tenant cells.TenantID `json:"tenant"`

	// One of these is set, as Kind says.
	Outcome *Outcome `json:"outcome,omitempty"`
	Removal *Removal `json:"removal,omitempty"`
	Clients *Clients `json:"clients,omitempty"`
	End     *End     `json:"end,omitempty"`
}

// Verdicts.
const (
	Committed  = "COMMITTED"   // the target serves
	RolledBack = "ROLLED_BACK" // the source serves again
)

// Outcome is how a move ended.
type Outcome struct {
	Verdict string       `json:"verdict"`
	Reason  string       `json:"reason,omitempty"`
	Source  cells.CellID `json:"source"`
	Target  cells.CellID `json:"target"`
	// Base is the epoch that the source served at; it was closed at Closed, and the
	// winner opened at Opened.
	Base   cells.Epoch `json:"base"`
	Closed cells.Epoch `json:"closed"`
	Opened cells.Epoch `json:"opened"`
	// EventMark is the last event of the source, DataMark its last change that the
	// target has; of a committed move.
	EventMark cells.EventSeq `json:"event_mark"`
	DataMark  string         `json:"data_mark"`
	// Tables are the comparisons, in their order; empty for a stateless tenant, for a
	// move that ended before them, and, with ComparedUnknown, if they were lost with a
	// driver that died right behind the decision.
	Tables          []Table `json:"tables"`
	ComparedUnknown bool    `json:"compared_unknown,omitempty"`
	Rows            int64   `json:"rows"`
	Bytes           int64   `json:"bytes"`

	Actor     string `json:"actor"`
	Forced    bool   `json:"forced"`
	Operation string `json:"operation,omitempty"`
	Request   string `json:"request,omitempty"`
	Driver    string `json:"driver"`

	// Predicted is the pause that was expected; Bound what the cut might take before it
	// would have been rolled back; Pause what its driver measured, from the quiesce to
	// the activation. 0: not known, or there was no cut.
	Predicted time.Duration `json:"predicted"`
	Bound     time.Duration `json:"bound"`
	Pause     time.Duration `json:"pause"`
	// Clients is what edges had reported by then; nil: nothing.
	Clients *Seen   `json:"clients,omitempty"`
	Budget  *Budget `json:"budget,omitempty"`

	Created time.Time `json:"created"`
	Started time.Time `json:"started,omitzero"`
	Cut     time.Time `json:"cut,omitzero"`
	Decided time.Time `json:"decided,omitzero"`
	Served  time.Time `json:"served,omitzero"`
	// Remains is what the loser still held, and is to be removed.
	Remains []cells.Residue `json:"remains,omitempty"`
}

// Table is one comparison of a table's rows, which were equal on both sides. Before the
// cut, keys that differ are left for a later comparison, since changes are on their way;
// in the cut, a difference ends the move.
type Table struct {
	Table string `json:"table"`
	// Position in the source's changes, of the source's rows; Whole, or the number of keys
	// that had changed and were found equal.
	Position string `json:"position"`
	Whole    bool   `json:"whole"`
	Keys     int64  `json:"keys"`
	Source   Digest `json:"source"`
	Target   Digest `json:"target"`
}

// Digest is an order-independent digest of rows over every column.
type Digest struct {
	Rows int64  `json:"rows"`
	Sum  string `json:"sum"`
}

// Budget is what the move did to the tenant's budget.
type Budget struct {
	Limit  time.Duration `json:"limit"`
	Window time.Duration `json:"window"`
	// Charged is what counts: what clients saw, or the driver's pause when no edge has
	// reported. Before and After are what was left without it and with it.
	Charged time.Duration `json:"charged"`
	Before  time.Duration `json:"before"`
	After   time.Duration `json:"after"`
}

// Seen is what the clients of all edges saw: refusals because of the move. Requests
// that were held and then answered are none.
type Seen struct {
	// Edges reported, by process; Refused requests in all of them; Span from the
	// arrival of the first of them until the last was told it might come again.
	Edges   int           `json:"edges"`
	Refused int64         `json:"refused"`
	Span    time.Duration `json:"span"`
}

// Clients amends an outcome by what edges have reported since.
type Clients struct {
	Seen   Seen    `json:"seen"`
	Budget *Budget `json:"budget,omitempty"`
}

// Removal says what became of rows that an outcome said remained.
type Removal struct {
	Cell  cells.CellID `json:"cell"`
	Epoch cells.Epoch  `json:"epoch"`
	// Gone: they were removed, and the cell has verified that none is left. Otherwise
	// they are not to be removed any more: the cell holds the tenant again.
	Gone bool `json:"gone"`
}

// End closes a receipt: nothing that the outcome said remained is left to tell about, and
// what edges report later changes the budget and the move's record only.
type End struct {
	// Statements is how many the receipt has, this one included.
	Statements int `json:"statements"`
}

// Ended reports whether the statements of a verified receipt are all that there are. If
// not, more may follow, or some were cut off: the directory knows.
func Ended(list []Statement) bool { return len(list) > 0 && list[len(list)-1].End != nil }

// check reports what is missing or out of place.
func (s *Statement) check() error {
	set := map[Kind]bool{KindOutcome: s.Outcome != nil, KindRemoval: s.Removal != nil, KindClients: s.Clients != nil, KindEnd: s.End != nil}
	n := 0
	for _, is := range set {
		if is {
			n++
		}
	}
	switch {
	case n != 1 || !set[s.Kind]:
		return fmt.Errorf("%w: receipt: a statement of kind %q without its content, or with another's", cells.ErrInvalid, s.Kind)
	case (s.N == 0) != (s.Kind == KindOutcome) || (s.N == 0) != (s.Prev == ""):
		return fmt.Errorf("%w: receipt: statement %d is of kind %q", cells.ErrInvalid, s.N, s.Kind)
	case s.Outcome != nil && s.Outcome.Verdict != Committed && s.Outcome.Verdict != RolledBack:
		return fmt.Errorf("%w: receipt: verdict %q", cells.ErrInvalid, s.Outcome.Verdict)
	}
	if s.End != nil && s.End.Statements != s.N+1 {
		return fmt.Errorf("%w: receipt: statement %d ends a receipt of %d", cells.ErrInvalid, s.N, s.End.Statements)
	}
	return errors.Join(s.Move.Validate(), s.Tenant.Validate())
}
