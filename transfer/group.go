// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"
	"fmt"

	"github.com/cloister-dev/cloister/cells"
)

// GroupID names moves that may share what a source has to hold for them: those of one
// campaign. Within a source's database the pair of cells is part of a group's name, so
// that one id serves all pairs. "" is no group.
//
// Sharing changes nothing of a move but what it costs: each member has its own import,
// fence, marks, comparison and removal, and ends alone. A store shares what it can; one
// that has nothing to share does as if there were no group.
type GroupID string

// MaxGroupID is the largest size of a group's id in bytes.
const MaxGroupID = 128

// Validate checks the syntax of an id: printable ASCII without blanks. The error wraps
// [cells.ErrInvalid].
func (g GroupID) Validate() error {
	if g == "" || len(g) > MaxGroupID {
		return fmt.Errorf("%w: group id of %d bytes, want 1 to %d", cells.ErrInvalid, len(g), MaxGroupID)
	}
	for _, c := range []byte(g) {
		if c <= ' ' || c > '~' {
			return fmt.Errorf("%w: group id %q", cells.ErrInvalid, string(g))
		}
	}
	return nil
}

type groupKey struct{}

// ContextWithGroup makes the move that is prepared with the context a member of the
// group; "" makes it none of any. Only Source.Begin looks at it, and Survey, which says
// what Begin needs: a capture that was begun stays what it is.
func ContextWithGroup(ctx context.Context, g GroupID) context.Context {
	return context.WithValue(ctx, groupKey{}, g)
}

// GroupOf returns what [ContextWithGroup] has set, or "".
func GroupOf(ctx context.Context) GroupID {
	g, _ := ctx.Value(groupKey{}).(GroupID)
	return g
}

type moveKey struct{}

// ContextForMove tells Survey which move is to be begun: a member of a group
// ([ContextWithGroup]) needs less than a move that is captured alone.
func ContextForMove(ctx context.Context, m cells.MoveRef) context.Context {
	return context.WithValue(ctx, moveKey{}, m)
}

// MoveOf returns what [ContextForMove] has set, or the zero move.
func MoveOf(ctx context.Context) cells.MoveRef {
	m, _ := ctx.Value(moveKey{}).(cells.MoveRef)
	return m
}

type viewlessKey struct{}

// ContextWithoutView tells Source.Begin that no View follows soon: a way back is begun
// when its rows are there already. Nothing is kept open for one.
func ContextWithoutView(ctx context.Context) context.Context {
	return context.WithValue(ctx, viewlessKey{}, true)
}

// Viewless reports whether [ContextWithoutView] was called.
func Viewless(ctx context.Context) bool {
	viewless, _ := ctx.Value(viewlessKey{}).(bool)
	return viewless
}

type aloneKey struct{}

// ContextAlone lets Source.Changes take a member out of its group, with a slot of its
// own, when another process of the cell reads the changes of the group; without it the
// call fails with [ErrElsewhere].
func ContextAlone(ctx context.Context) context.Context {
	return context.WithValue(ctx, aloneKey{}, true)
}

// Alone reports whether [ContextAlone] was called.
func Alone(ctx context.Context) bool {
	alone, _ := ctx.Value(aloneKey{}).(bool)
	return alone
}
