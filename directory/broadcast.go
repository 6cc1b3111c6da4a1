// SPDX-License-Identifier: Apache-2.0

package directory

import "sync"

// broadcast wakes everybody who waits for the next change. The zero value is
// ready.
type broadcast struct {
	mu sync.Mutex
	ch chan struct{} // guarded by mu; closed by the next wake
}

// next returns a channel that is closed by the next wake. Take it before reading
// what it announces.
func (b *broadcast) next() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ch == nil {
		b.ch = make(chan struct{})
	}
	return b.ch
}

func (b *broadcast) wake() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ch != nil {
		close(b.ch)
		b.ch = nil
	}
}
