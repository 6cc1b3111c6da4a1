// SPDX-License-Identifier: Apache-2.0

package names

import (
	"context"

	"github.com/cloister-dev/cloister/member/stores"
)

// planted is the value of a mark.
const planted = "planted"

// Names are a store's reserved names. A store embeds it, and has a method of its own
// for what it does otherwise. All fields are required; it is not changed once used.
type Names struct {
	// Nonce is the name of the nonce, Mark what the name of a mark begins with.
	Nonce, Mark string
	// Get reads a name's value.
	Get func(ctx context.Context, name string) (value string, there bool, err error)
	// Put writes it, in place of what was there.
	Put func(ctx context.Context, name, value string) error
	// Drop removes the name; it is no error if there is none.
	Drop func(ctx context.Context, name string) error
}

// WriteNonce implements [stores.Store].
func (n *Names) WriteNonce(ctx context.Context, v stores.Nonce) error {
	if err := v.Validate(); err != nil {
		return err
	}
	return n.Put(ctx, n.Nonce, string(v))
}

// ReadNonce implements [stores.Store].
func (n *Names) ReadNonce(ctx context.Context) (stores.Nonce, error) {
	v, there, err := n.Get(ctx, n.Nonce)
	if err != nil {
		return "", err
	}
	if !there {
		return "", stores.ErrNoNonce
	}
	if err := stores.Nonce(v).Validate(); err != nil {
		return "", err
	}
	return stores.Nonce(v), nil
}

// DeleteNonce implements [stores.Store].
func (n *Names) DeleteNonce(ctx context.Context) error { return n.Drop(ctx, n.Nonce) }

// Plant implements [stores.Store].
func (n *Names) Plant(ctx context.Context, m stores.Mark) error {
	if err := m.Validate(); err != nil {
		return err
	}
	return n.Put(ctx, n.Mark+string(m), planted)
}

// Visible implements [stores.Store].
func (n *Names) Visible(ctx context.Context, m stores.Mark) (bool, error) {
	if err := m.Validate(); err != nil {
		return false, err
	}
	_, there, err := n.Get(ctx, n.Mark+string(m))
	return there, err
}

// Remove implements [stores.Store].
func (n *Names) Remove(ctx context.Context, m stores.Mark) error {
	if err := m.Validate(); err != nil {
		return err
	}
	return n.Drop(ctx, n.Mark+string(m))
}
