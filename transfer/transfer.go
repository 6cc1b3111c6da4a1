// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
)

// Position is a point in the changes that a source captures for a move: an LSN,
// a number of the change log. It is written as 16 hexadecimal digits, so that
// positions of one source compare as strings. "" comes before all of them.
type Position string

// MakePosition writes n as a position.
func MakePosition(n uint64) Position { return Position(fmt.Sprintf("%016X", n)) }

// Number is the inverse of MakePosition; 0 for "". The error wraps
// [cells.ErrInvalid].
func (p Position) Number() (uint64, error) {
	if p == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(string(p), 16, 64)
	if err != nil || len(p) != 16 {
		return 0, fmt.Errorf("%w: position %q", cells.ErrInvalid, string(p))
	}
	return n, nil
}

// TableInfo describes one tenant table as a store sees it.
type TableInfo struct {
	guard.Table
	Columns []Column `json:"columns"`
	// Key is the primary key in its order, the tenant column included.
	Key []string `json:"key"`
	// Rows and Bytes are estimates for the tenant. Rows is 0 only if there is none.
	Rows  int64 `json:"rows"`
	Bytes int64 `json:"bytes"`
	// Rules are what else the table asks of its rows, one a line, sorted: constraints,
	// indexes, partitions. Names of constraints and indexes are left out.
	Rules []string `json:"rules,omitempty"`
	// Sequences give out values of columns.
	Sequences []Sequence `json:"sequences,omitempty"`
}

// Sequence is what gives out the values of a column.
type Sequence struct {
	Column string `json:"column"`
	Name   string `json:"name"`
	// Last is the last value that was given out; 0 if none was, or if the agent may not
	// see it. Highest is the tenant's highest value; 0 if it has none.
	Last    int64 `json:"last"`
	Highest int64 `json:"highest"`
}

// Disk is the room of the file system that holds a database.
type Disk struct {
	Free  int64 `json:"free"` // bytes
	Total int64 `json:"total"`
}

// Column is one column of a tenant table.
type Column struct {
	Name      string `json:"name"`
	Type      string `json:"type"`
	Generated bool   `json:"generated,omitempty"`
}

// Survey is what one side of a move looks like to a preflight.
type Survey struct {
	Engine string `json:"engine"` // "postgres", "sqlite"
	// Version is the engine's, for people.
	Version string `json:"version,omitempty"`
	// Tables are in the order in which they can be filled: what is referred to first.
	Tables []TableInfo `json:"tables"`
	// Fingerprint covers names, columns, types, collations, keys, constraints and indexes of
	// all tables. It is the same for two cells exactly if they have the same schema.
	Fingerprint string `json:"fingerprint"`
	// Extensions are those of the database, with their versions.
	Extensions map[string]string `json:"extensions,omitempty"`
	// Collation is the database's own.
	Collation string `json:"collation,omitempty"`
	// Disk is nil where the agent cannot see it.
	Disk *Disk `json:"disk,omitempty"`
	// Moves are those that this store knows about the tenant: captures and imports
	// that were begun and not yet cleaned up. Rows of an import are no surprise.
	Moves    []cells.MoveID  `json:"moves,omitempty"`
	Findings []cells.Finding `json:"findings"`
}

// Seal computes the Fingerprint.
func (s *Survey) Seal() error {
	type shape struct {
		guard.Table
		Columns []Column
		Key     []string
		Rules   []string
	}
	shapes := make([]shape, len(s.Tables))
	for i, t := range s.Tables {
		cols := slices.Clone(t.Columns)
		slices.SortFunc(cols, func(a, b Column) int { return strings.Compare(a.Name, b.Name) })
		shapes[i] = shape{t.Table, cols, t.Key, t.Rules}
	}
	slices.SortFunc(shapes, func(a, b shape) int { return strings.Compare(a.Name, b.Name) })
	text, err := json.Marshal(shapes)
	if err != nil {
		return err
	}
	sum := sha256.Sum256(text)
	s.Fingerprint = hex.EncodeToString(sum[:])
	return nil
}

// Batch is a piece of a snapshot or of the changes. Data and LastKey belong to the
// receiver.
type Batch struct {
	Table string `json:"table,omitempty"`
	// Data are rows or changes, encoded by the engine that made them.
	Data []byte `json:"-"`
	// Form is how rows are encoded, where the engine has several ways: "", or [FormBinary]
	// for those that were asked for with [ContextWithBinaryRows].
	Form string `json:"form,omitempty"`
	// Count is the number of rows or changes in Data.
	Count int64 `json:"count,omitempty"`
	// LastKey is where the copy of a table goes on after this batch.
	LastKey []byte `json:"last_key,omitempty"`
	// Upto is the position reached once the batch, and those before it, are applied.
	Upto Position `json:"upto,omitempty"`
	// End: the rows of the table, or the changes that reach Upto, are complete.
	// Changes without End are the first part of something that must not be seen
	// in parts.
	End bool `json:"end,omitempty"`
}

// KeySet names rows of one table by their keys.
type KeySet struct {
	Table string `json:"table"`
	// All: every row of the tenant. Data and Count are unused then.
	All bool `json:"all,omitempty"`
	// Data are keys, encoded by the engine.
	Data  []byte `json:"data,omitempty"`
	Count int64  `json:"count,omitempty"`
}

// Digest is an order-independent digest of a set of rows. Two stores of one
// engine give equal digests exactly if the rows are equal in every column, bar
// collisions of the hash.
type Digest struct {
	Table string `json:"table"`
	Rows  int64  `json:"rows"`
	Sum   string `json:"sum"`
}

// Agent is everything that a cell's agent does with the rows of moves; the
// member serves it to the driver and to the other cell. It is made by [New] from a
// Source and a Sink of one store. Every method may be repeated, and may be called
// for one move by several processes at once: they take turns.
type Agent interface {
	// Survey describes the tenant's rows here and what stands in a move's way.
	Survey(ctx context.Context, tenant cells.TenantID) (Survey, error)
	// Prepare, at the target: claim the tenant's fence closed at m.CloseEpoch(),
	// snapshot from src, catch up, verify what is there, return when a cut is worth it.
	// [cells.ErrStaleOrder] when the move has been overtaken, [cells.ErrInvalid] with
	// the findings when a preflight would have refused the move, [ErrMismatch] when
	// the two sides differ, [ErrSchemaChanged] and [ErrRetention] when the move may not
	// go on. The context carries what it may cost: [ContextWithRate], [ContextWithLimits].
	Prepare(ctx context.Context, m cells.MoveRef, src Source, progress func(cells.Progress)) (cells.Prediction, error)
	// Finish, at the target: apply up to the source's final position, verify, and
	// return the mark. The source's fence is closed at m.CloseEpoch() by m, otherwise
	// [cells.ErrNotApplicable], as when Prepare has not succeeded. [ErrMismatch] when
	// the two sides differ: the move must be rolled back.
	Finish(ctx context.Context, m cells.MoveRef, src Source, progress func(cells.Progress)) (string, error)
	// Return, at the cell that keeps the rows of a move that can be undone: apply what
	// src, the owner, has committed up to now, and return. m is the way back
	// ([cells.MoveRef.Back]). [cells.ErrReturnLost] when changes were missed,
	// [cells.ErrStaleOrder] when the fence has passed m or the rows are being removed.
	Return(ctx context.Context, m cells.MoveRef, src Source) (cells.Returned, error)
	// Free, at the owner: end the way back of a move that can no longer be undone.
	Free(ctx context.Context, tenant cells.TenantID, move cells.MoveID) error
	// Discard, at the loser: release captures of the move and remove the tenant's
	// rows while the fence is closed at exactly r.Epoch. [cells.ErrStaleOrder] if the
	// fence is higher; [cells.ErrInvalid] if there are rows that the move neither
	// captured nor brought.
	Discard(ctx context.Context, tenant cells.TenantID, r cells.Residue, progress func(cells.Progress)) error
	// Source is this cell as the source of a move.
	Source() Source
}

// Prover is what an [Agent] may offer besides: a Finish that also returns what was
// compared, from the first comparison of whole tables to that of the cut. Repeating
// it returns the same. A [Mover] does.
type Prover interface {
	FinishProved(ctx context.Context, m cells.MoveRef, src Source, progress func(cells.Progress)) (mark string, compared []cells.Comparison, err error)
}

// Lister is an [Agent] that can say which tenants have rows in its store, at most
// limit of each table. [Mover] does.
type Lister interface {
	Holdings(ctx context.Context, limit int) ([]Holding, error)
}

// PathTransfer is the prefix below which a cell's agent serves [Handler].
const PathTransfer = "/cells/v1/transfer/"
