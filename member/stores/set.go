// SPDX-License-Identifier: Apache-2.0

package stores

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// Set is all stores of one cell: the authority, which makes the deployment id, and
// those derived from it. It is immutable and as safe for concurrent use as they
// are; it does not own them.
type Set struct {
	authority Store
	all       []Store // the authority first
	location  Location
}

// NewSet returns a set. [cells.ErrInvalid] when two stores are of one kind, two have
// a bucket, or a kind or location is malformed.
func NewSet(authority Store, derived ...Store) (*Set, error) {
	s := &Set{authority: authority, all: append([]Store{authority}, derived...)}
	seen := map[Kind]bool{}
	for _, st := range s.all {
		k, l := st.Kind(), st.Location()
		if err := k.Validate(); err != nil {
			return nil, err
		}
		if seen[k] {
			return nil, fmt.Errorf("%w: a cell has one store of kind %s, not two", cells.ErrInvalid, k)
		}
		seen[k] = true
		if l.IsZero() {
			continue
		}
		if err := l.Validate(); err != nil {
			return nil, err
		}
		if !s.location.IsZero() {
			return nil, fmt.Errorf("%w: a cell has one bucket, not %s and %s", cells.ErrInvalid, s.location.Bucket, l.Bucket)
		}
		s.location = l
	}
	return s, nil
}

// Authority returns the store that makes the deployment id.
func (s *Set) Authority() Store { return s.authority }

// All returns the stores, the authority first. The caller owns the slice.
func (s *Set) All() []Store { return slices.Clone(s.all) }

// Kinds returns the stores' kinds, sorted. The caller owns the slice.
func (s *Set) Kinds() []Kind {
	var out []Kind
	for _, st := range s.all {
		out = append(out, st.Kind())
	}
	slices.Sort(out)
	return out
}

// Location returns the bucket and prefix, or the zero Location.
func (s *Set) Location() Location { return s.location }

// Pair returns the deployment id that every store carries. It makes one when no
// store has any, and gives the authority's to derived stores that have none: a
// derived store may be new, or have been made anew.
//
// [ErrMismatch] when two stores carry different ids, or a derived store carries one
// and the authority none: then nothing has been written to any of them. A process
// starts only after Pair has answered.
func (s *Set) Pair(ctx context.Context) (DeploymentID, error) {
	id, missing, err := s.look(ctx)
	if err != nil {
		return "", err
	}
	if id == "" {
		if id, err = s.authority.Establish(ctx, NewDeploymentID()); err != nil {
			return "", wrap(s.authority, "making its deployment id", err)
		}
	}
	for _, st := range missing {
		if st.Kind() == s.authority.Kind() {
			continue
		}
		got, err := st.Establish(ctx, id)
		if err != nil {
			return "", wrap(st, "giving it the deployment id", err)
		}
		if got != id {
			return "", s.mismatch(id, st, got)
		}
	}
	return id, nil
}

// Deployment is Pair without writing: [ErrNoDeployment] when a store carries no id.
func (s *Set) Deployment(ctx context.Context) (DeploymentID, error) {
	id, missing, err := s.look(ctx)
	if err != nil {
		return "", err
	}
	if len(missing) > 0 {
		return "", wrap(missing[0], "reading its deployment id", ErrNoDeployment)
	}
	return id, nil
}

// look reads every store's id and returns the authority's and the stores without.
func (s *Set) look(ctx context.Context) (id DeploymentID, missing []Store, err error) {
	for _, st := range s.all {
		got, err := st.Identity(ctx)
		switch {
		case err != nil:
			return "", nil, wrap(st, "reading its deployment id", err)
		case got.Kind != st.Kind() || got.Location != st.Location():
			return "", nil, wrap(st, "reading its identity", fmt.Errorf("%w: it says that it is %s at %+v", ErrMismatch, got.Kind, got.Location))
		case got.Deployment == "":
			missing = append(missing, st)
		case st.Kind() == s.authority.Kind():
			id = got.Deployment
		case got.Deployment != id:
			return "", nil, s.mismatch(id, st, got.Deployment)
		}
	}
	return id, missing, nil
}

func (s *Set) mismatch(id DeploymentID, st Store, got DeploymentID) error {
	if id == "" {
		return fmt.Errorf("%w: %s carries %s and %s none; a new %s cannot take over a %s that belongs to a deployment",
			ErrMismatch, st.Kind(), got, s.authority.Kind(), s.authority.Kind(), st.Kind())
	}
	return fmt.Errorf("%w: %s carries %s, %s carries %s", ErrMismatch, s.authority.Kind(), id, st.Kind(), got)
}

// WriteNonces gives every store a nonce of its own and returns them by kind. On an
// error some stores may have one; DeleteNonces removes them.
func (s *Set) WriteNonces(ctx context.Context) (map[Kind]Nonce, error) {
	out := make(map[Kind]Nonce, len(s.all))
	for _, st := range s.all {
		n := NewNonce()
		if err := st.WriteNonce(ctx, n); err != nil {
			return nil, wrap(st, "writing a nonce", err)
		}
		out[st.Kind()] = n
	}
	return out, nil
}

// ReadNonces reads the nonce of every store, all at once. A store without one has no
// entry.
func (s *Set) ReadNonces(ctx context.Context) (map[Kind]Nonce, error) {
	type answer struct {
		st  Store
		n   Nonce
		err error
	}
	answers := make(chan answer, len(s.all))
	for _, st := range s.all {
		go func() {
			n, err := st.ReadNonce(ctx)
			answers <- answer{st, n, err}
		}()
	}
	out := make(map[Kind]Nonce, len(s.all))
	var errs []error
	for range s.all { // waits for all of them, so that none is left running
		a := <-answers
		switch {
		case a.err == nil:
			out[a.st.Kind()] = a.n
		case !errors.Is(a.err, ErrNoNonce):
			errs = append(errs, wrap(a.st, "reading its nonce", a.err))
		}
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return out, nil
}

// DeleteNonces removes the nonces of every store, of those after a failure too.
func (s *Set) DeleteNonces(ctx context.Context) error {
	var errs []error
	for _, st := range s.all {
		if err := st.DeleteNonce(ctx); err != nil {
			errs = append(errs, wrap(st, "removing its nonce", err))
		}
	}
	return errors.Join(errs...)
}

// Empty reports whether no store holds anything of a tenant. When one does, holds
// says which, and what.
func (s *Set) Empty(ctx context.Context) (empty bool, holds string, err error) {
	for _, st := range s.all {
		empty, holds, err := st.Empty(ctx)
		if err != nil {
			return false, "", wrap(st, "looking whether it is empty", err)
		}
		if !empty {
			return false, string(st.Kind()) + ": " + holds, nil
		}
	}
	return true, "", nil
}

// Tenants returns the tenants that any store can name, sorted.
func (s *Set) Tenants(ctx context.Context) ([]string, error) {
	var out []string
	for _, st := range s.all {
		l, ok := st.(TenantLister)
		if !ok {
			continue
		}
		some, err := l.Tenants(ctx)
		if err != nil {
			return nil, wrap(st, "listing its tenants", err)
		}
		out = append(out, some...)
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

// Isolated checks that two cells' stores are not each other's: locations do not
// overlap, a mark that is planted in a store of one is seen there and in no store of
// that kind of the other, in both directions. The marks are removed again.
//
// [ErrShared] names the kind; an error of a store decides nothing.
func Isolated(ctx context.Context, a, b *Set) error {
	if a.location.Overlaps(b.location) {
		return fmt.Errorf("%w: bucket %s, prefixes %q and %q", ErrShared, a.location.Bucket, a.location.Prefix, b.location.Prefix)
	}
	for _, x := range a.all {
		for _, y := range b.all {
			if x.Kind() == y.Kind() {
				if err := isolated(ctx, x, y); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// tidyTime bounds the removal of a mark.
const tidyTime = 10 * time.Second

func isolated(ctx context.Context, a, b Store) error {
	if err := oneWay(ctx, a, b); err != nil {
		return err
	}
	return oneWay(ctx, b, a)
}

func oneWay(ctx context.Context, from, to Store) (err error) {
	m := NewMark()
	// Also after a failed Plant, which may have been carried out, and when ctx has ended.
	defer func() {
		tidy, cancel := context.WithTimeout(context.WithoutCancel(ctx), tidyTime)
		defer cancel()
		if rerr := from.Remove(tidy, m); rerr != nil && err == nil {
			err = wrap(from, "removing a mark", rerr)
		}
	}()
	if err := from.Plant(ctx, m); err != nil {
		return wrap(from, "planting a mark", err)
	}
	own, err := from.Visible(ctx, m)
	switch {
	case err != nil:
		return wrap(from, "looking for a mark", err)
	case !own:
		return wrap(from, "looking for a mark", fmt.Errorf("%w: its own mark cannot be seen, so nothing can be told", cells.ErrUnavailable))
	}
	other, err := to.Visible(ctx, m)
	switch {
	case err != nil:
		return wrap(to, "looking for a mark", err)
	case other:
		return fmt.Errorf("%w: what one writes to its %s the other can see", ErrShared, to.Kind())
	}
	return nil
}

func wrap(st Store, doing string, err error) error {
	return fmt.Errorf("%s, %s: %w", st.Kind(), doing, err)
}
