// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode/utf8"
)

// Bounds of a row. A table refuses what is larger, so that a row of one table
// fits every other.
const (
	maxNumber      = 1 << 62 // epochs and sequence numbers fit a signed column with room to add
	maxOperation   = 256
	maxStamp       = 128
	maxMark        = 4096
	maxPeople      = 4096 // Actor and Reason are cut to this, never refused
	maxResidue     = 256
	defaultPage    = 1000
	maxPage        = 10000
	maxEncodedRow  = 256 << 10
	watchBatchRows = 1000
)

// CanonicalRoute returns r as every table stores it: times in UTC without a
// monotonic reading, an empty Residue as nil, and the two texts that are for
// people (Actor, Reason) made valid UTF-8 and cut to 4096 bytes, because a
// rollback must not fail over the length of its reason. It shares no memory
// with r.
func CanonicalRoute(r TenantRoute) TenantRoute {
	r.Deadline = canonicalTime(r.Deadline)
	r.UpdatedAt = canonicalTime(r.UpdatedAt)
	r.Actor = peopleText(r.Actor)
	r.Reason = peopleText(r.Reason)
	if len(r.Residue) == 0 {
		r.Residue = nil
	}
	r = r.Clone()
	for i := range r.Residue {
		r.Residue[i].Until = canonicalTime(r.Residue[i].Until)
	}
	return r
}

func canonicalTime(t time.Time) time.Time {
	if t.IsZero() {
		return time.Time{}
	}
	return t.Round(0).UTC()
}

func peopleText(s string) string {
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
	if len(s) <= maxPeople {
		return s
	}
	n := maxPeople
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

// ValidateRoute reports whether r is well formed taken alone: identifiers, a
// known state, Floor <= Epoch, a move that is described completely or not at
// all, texts and lists within their bounds. The error wraps [ErrInvalid].
func ValidateRoute(r TenantRoute) error {
	if err := r.TenantID.Validate(); err != nil {
		return err
	}
	if err := validateRoute(r); err != nil {
		return fmt.Errorf("%w: route of %s: %w", ErrInvalid, r.TenantID, err)
	}
	return nil
}

func validateRoute(r TenantRoute) error {
	if r.State == 0 || int(r.State) >= len(stateNames) {
		return fmt.Errorf("state %d is unknown", uint8(r.State))
	}
	if err := r.CellID.Validate(); err != nil {
		return err
	}
	if r.Epoch == 0 || r.Epoch > maxNumber {
		return fmt.Errorf("epoch %d is outside 1 to %d", r.Epoch, uint64(maxNumber))
	}
	if r.Floor > r.Epoch {
		return fmt.Errorf("floor %d is above epoch %d", r.Floor, r.Epoch)
	}
	if r.EventMark > maxNumber {
		return fmt.Errorf("event mark %d is above %d", r.EventMark, uint64(maxNumber))
	}
	if err := validateMoveFields(r); err != nil {
		return err
	}
	if len(r.Residue) > maxResidue {
		return fmt.Errorf("%d residues, at most %d are kept", len(r.Residue), maxResidue)
	}
	for _, x := range r.Residue {
		if err := errors.Join(x.Cell.Validate(), x.Move.Validate()); err != nil {
			return fmt.Errorf("residue: %w", err)
		}
		if x.Epoch == 0 || x.Epoch > r.Epoch+2 { // the entry of a running move: Base+2
			return fmt.Errorf("residue at %s has epoch %d, the route has %d", x.Cell, x.Epoch, r.Epoch)
		}
		if x.Back != "" && (x.Back.Validate() != nil || x.Back == x.Cell) || x.Undoes != "" && x.Undoes.Validate() != nil || x.Held() && x.Back == "" {
			return fmt.Errorf("residue at %s has its way back from %q, undoes %q", x.Cell, x.Back, x.Undoes)
		}
		if y := x.Until.UTC().Year(); y < 0 || y > 9999 {
			return fmt.Errorf("a time lies in the year %d", y)
		}
	}
	for _, t := range []struct {
		name, text string
		max        int
	}{{"operation id", r.OperationID, maxOperation}, {"stamp", r.Stamp, maxStamp}, {"data mark", r.DataMark, maxMark},
		{"actor", r.Actor, maxPeople}, {"reason", r.Reason, maxPeople}} {
		if len(t.text) > t.max {
			return fmt.Errorf("%s has %d bytes, at most %d are kept", t.name, len(t.text), t.max)
		}
		if !utf8.ValidString(t.text) || strings.ContainsRune(t.text, 0) {
			return fmt.Errorf("%s is not plain UTF-8", t.name)
		}
	}
	for _, t := range []time.Time{r.Deadline, r.UpdatedAt} {
		if y := t.UTC().Year(); y < 0 || y > 9999 {
			return fmt.Errorf("a time lies in the year %d", y)
		}
	}
	return nil
}

func validateMoveFields(r TenantRoute) error {
	if r.MoveID == "" {
		if r.SourceCell != "" || r.TargetCell != "" || r.Base != 0 {
			return errors.New("has the ends of a move but no move id")
		}
		if r.Moving() {
			return fmt.Errorf("is %s without a move id", r.State)
		}
		return nil
	}
	if r.State == StateDeleting || r.State == StateDeleted {
		return fmt.Errorf("is %s with a move", r.State)
	}
	if err := errors.Join(r.MoveID.Validate(), r.SourceCell.Validate(), r.TargetCell.Validate()); err != nil {
		return err
	}
	if r.SourceCell == r.TargetCell {
		return fmt.Errorf("moves from %s to itself", r.SourceCell)
	}
	if r.CellID != r.SourceCell && r.CellID != r.TargetCell {
		return fmt.Errorf("is at %s, which is no end of its move", r.CellID)
	}
	if r.Base > r.Epoch || r.Epoch-r.Base > 2 {
		return fmt.Errorf("base %d does not fit epoch %d", r.Base, r.Epoch)
	}
	return nil
}

// ValidateChange reports whether a table may replace old by next; a zero old
// (State 0) is a tenant without a row. Beyond [ValidateRoute] of next it
// requires what can be seen from two rows alone:
//
//   - it is the same tenant, and Epoch and Floor do not decrease;
//   - one epoch is never given to two cells, and a cell that takes over starts
//     with a Floor above every epoch that the other was given;
//   - a closed epoch (COPYING, DELETING, DELETED) is left only to a higher one,
//     except that DELETING becomes DELETED;
//   - COMMITTING only becomes ACTIVE, at its cell and epoch.
//
// There is no change that removes a row: a deleted tenant keeps its tombstone.
// The error wraps [ErrInvalid].
func ValidateChange(old, next TenantRoute) error {
	if err := ValidateRoute(next); err != nil {
		return err
	}
	if old.State == 0 {
		return nil
	}
	if err := validateChange(old, next); err != nil {
		return fmt.Errorf("%w: route of %s: %w", ErrInvalid, next.TenantID, err)
	}
	return nil
}

func validateChange(old, next TenantRoute) error {
	switch {
	case old.TenantID != next.TenantID:
		return fmt.Errorf("replaces the row of %s", old.TenantID)
	case next.Epoch < old.Epoch:
		return fmt.Errorf("epoch would fall from %d to %d", old.Epoch, next.Epoch)
	case next.Floor < old.Floor:
		return fmt.Errorf("floor would fall from %d to %d", old.Floor, next.Floor)
	}
	if next.CellID != old.CellID {
		if next.Epoch == old.Epoch {
			return fmt.Errorf("epoch %d was given to %s, not to %s", old.Epoch, old.CellID, next.CellID)
		}
		if next.Floor <= old.Epoch {
			return fmt.Errorf("floor %d would admit at %s what was admitted at %s up to epoch %d", next.Floor, next.CellID, old.CellID, old.Epoch)
		}
	}
	same := next.Epoch == old.Epoch
	switch old.State {
	case StateCommitting:
		if !same || next.State != StateCommitting && next.State != StateActive {
			return fmt.Errorf("is decided: COMMITTING at epoch %d cannot become %s at %d", old.Epoch, next.State, next.Epoch)
		}
	case StateCopying, StateDeleted:
		if same && next.State != old.State {
			return fmt.Errorf("epoch %d was closed by %s and cannot be used for %s", old.Epoch, old.State, next.State)
		}
	case StateDeleting:
		if same && next.State != StateDeleting && next.State != StateDeleted {
			return fmt.Errorf("epoch %d was closed by DELETING and cannot be used for %s", old.Epoch, next.State)
		}
	}
	return nil
}

// EncodeRoute returns the row's one JSON form, which every table stores and
// sends. The error wraps [ErrInvalid].
func EncodeRoute(r TenantRoute) ([]byte, error) {
	b, err := json.Marshal(r)
	if err != nil {
		return nil, fmt.Errorf("%w: route of %q: %w", ErrInvalid, string(r.TenantID), err)
	}
	return b, nil
}

// DecodeRoute reads what [EncodeRoute] wrote. It refuses unknown fields (a row
// of a newer version would lose them at the next write), anything after the row,
// more than 256 KiB, and rows that [ValidateRoute] refuses; the error wraps
// [ErrInvalid].
func DecodeRoute(b []byte) (TenantRoute, error) {
	var r TenantRoute
	if len(b) > maxEncodedRow {
		return TenantRoute{}, fmt.Errorf("%w: a row of %d bytes, at most %d are read", ErrInvalid, len(b), maxEncodedRow)
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&r); err != nil {
		return TenantRoute{}, fmt.Errorf("%w: row: %w", ErrInvalid, err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return TenantRoute{}, fmt.Errorf("%w: row of %q is followed by something else", ErrInvalid, string(r.TenantID))
	}
	if err := ValidateRoute(r); err != nil {
		return TenantRoute{}, err
	}
	return CanonicalRoute(r), nil
}

// PageSize is how many rows a page of these options may hold: Limit with its
// default and its upper bound applied.
func (o ListOptions) PageSize() int {
	switch {
	case o.Limit == 0:
		return defaultPage
	case o.Limit > maxPage:
		return maxPage
	}
	return o.Limit
}

// Validate reports whether the options are well formed. The error wraps [ErrInvalid].
func (o ListOptions) Validate() error {
	if o.Limit < 0 {
		return fmt.Errorf("%w: a page of %d rows", ErrInvalid, o.Limit)
	}
	if o.After != "" {
		if err := o.After.Validate(); err != nil {
			return fmt.Errorf("after: %w", err)
		}
	}
	if o.Cell != "" {
		return o.Cell.Validate()
	}
	return nil
}

// Matches reports whether the Cell filter keeps r.
func (o ListOptions) Matches(r *TenantRoute) bool {
	return o.Cell == "" || r.CellID == o.Cell || r.SourceCell == o.Cell || r.TargetCell == o.Cell
}

// endOf returns why ctx ended: its error and, if there is another, its cause.
func endOf(ctx context.Context) error {
	err, cause := ctx.Err(), context.Cause(ctx)
	if cause == nil || errors.Is(cause, err) {
		return err
	}
	return fmt.Errorf("%w: %w", err, cause)
}
