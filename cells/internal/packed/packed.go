// SPDX-License-Identifier: Apache-2.0

package packed

import (
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"sync"
	"sync/atomic"
)

const (
	shardBits = 8
	shards    = 1 << shardBits

	tagBits = 8
	// placeBits address units of the arena.
	placeBits = 32 - tagBits
	placeMask = 1<<placeBits - 1
	// minShift makes a unit of 4 bytes.
	minShift = 2

	slotEmpty   = 0
	slotDeleted = 1
	// firstUnit is where records begin: places 0 and 1 with tag 0 are the slots above.
	firstUnit = 2

	minSlots = 8
	minRoom  = 96
	maxKey   = 255
	// maxRecord is the longest record: lengths, the key, the kind and four numbers.
	maxRecord = 1 + maxKey + 1 + 5 + 3*binary.MaxVarintLen64
)

// Record is what is kept for a key.
type Record struct {
	// Kind is for the caller: a state, flags.
	Kind uint8
	// Cell is a small number: how short a record is depends on it.
	Cell uint32
	// Floor <= Epoch. The nearer they are the shorter is the record.
	Epoch, Floor, Revision uint64
}

// Table maps keys to records. It is safe for concurrent use. The zero value is not
// usable: see [New].
type Table struct {
	seed   maphash.Seed
	n      atomic.Int64
	shards [shards]shard
}

type shard struct {
	state atomic.Pointer[state]
	mu    sync.Mutex // held by the one writer; guards all below
	live  int        // keys
	taken int        // slots that are not empty
	used  int        // bytes of the arena, whole units
	dead  int        // bytes of records that were replaced or deleted
	_     [64 - 48%64]byte
}

// state is what readers of a shard see.
type state struct {
	index []uint32 // a power of two, at least one is empty; read and written atomically
	arena []byte   // bytes that a slot names are never written again
	shift uint8    // a unit of the arena is 1<<shift bytes
}

// New returns an empty table.
func New() *Table { return &Table{seed: maphash.MakeSeed()} }

// Len returns the number of keys.
func (t *Table) Len() int { return int(t.n.Load()) }

// Bytes returns the memory that indexes and arenas take, room included.
func (t *Table) Bytes() int {
	n := 0
	for i := range t.shards {
		if s := t.shards[i].state.Load(); s != nil {
			n += 4*cap(s.index) + cap(s.arena)
		}
	}
	return n
}

func (t *Table) hash(key string) uint64 { return maphash.String(t.seed, key) }

func (t *Table) shardOf(h uint64) *shard { return &t.shards[h>>(64-shardBits)] }

func tagOf(h uint64) uint32 { return uint32(h>>(64-shardBits-tagBits)) << placeBits }

// Get returns the key's record. It takes no lock and does not allocate.
func (t *Table) Get(key string) (Record, bool) {
	h := t.hash(key)
	s := t.shardOf(h).state.Load()
	if s == nil {
		return Record{}, false
	}
	if _, at := s.find(h, key); at != nil {
		return decode(at), true
	}
	return Record{}, false
}

// find returns the key's slot and what follows the key in its record; nil if the key is
// not there.
func (s *state) find(h uint64, key string) (slot int, rest []byte) {
	mask := uint64(len(s.index) - 1)
	tag := tagOf(h)
	for i := h & mask; ; i = (i + 1) & mask {
		v := atomic.LoadUint32(&s.index[i])
		if v == slotEmpty {
			return 0, nil
		}
		if v == slotDeleted || v&^uint32(placeMask) != tag {
			continue
		}
		if rec := s.arena[int(v&placeMask)<<s.shift:]; string(rec[1:1+int(rec[0])]) == key {
			return int(i), rec[1+int(rec[0]):]
		}
	}
}

// Put makes r the key's record.
func (t *Table) Put(key string, r Record) {
	if len(key) > maxKey || r.Floor > r.Epoch {
		panic(fmt.Sprintf("packed: a key of %d bytes, floor %d of epoch %d", len(key), r.Floor, r.Epoch))
	}
	var buf [maxRecord]byte
	rec := encode(buf[:0], key, r)
	h := t.hash(key)
	sh := t.shardOf(h)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	s := sh.state.Load()
	if s == nil || !sh.fits(s, len(rec)) {
		s = sh.rebuild(t, s, len(rec))
	}
	place := sh.used >> s.shift
	copy(s.arena[sh.used:], rec)
	sh.used += roundUp(len(rec), s.shift)
	v := tagOf(h) | uint32(place)
	if slot, rest := s.find(h, key); rest != nil {
		sh.dead += roundUp(recordLen(rest, len(key)), s.shift)
		atomic.StoreUint32(&s.index[slot], v)
		return
	}
	s.insert(h, v)
	sh.taken++
	sh.live++
	t.n.Add(1)
}

// Delete drops the key, and reports whether it was there.
func (t *Table) Delete(key string) bool {
	h := t.hash(key)
	sh := t.shardOf(h)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	s := sh.state.Load()
	if s == nil {
		return false
	}
	slot, rest := s.find(h, key)
	if rest == nil {
		return false
	}
	sh.dead += roundUp(recordLen(rest, len(key)), s.shift)
	atomic.StoreUint32(&s.index[slot], slotDeleted)
	sh.live--
	t.n.Add(-1)
	return true
}

// Each calls f with every key and its record until f returns false. What changes
// meanwhile is given as it was or as it is.
func (t *Table) Each(f func(key string, r Record) bool) {
	for i := range t.shards {
		s := t.shards[i].state.Load()
		if s == nil {
			continue
		}
		for j := range s.index {
			v := atomic.LoadUint32(&s.index[j])
			if v == slotEmpty || v == slotDeleted {
				continue
			}
			rec := s.arena[int(v&placeMask)<<s.shift:]
			n := 1 + int(rec[0])
			if !f(string(rec[1:n]), decode(rec[n:])) {
				return
			}
		}
	}
}

// fits reports whether the state has room for one more record of n bytes.
func (sh *shard) fits(s *state, n int) bool {
	return sh.used+roundUp(n, s.shift) <= len(s.arena) && 4*(sh.taken+1) <= 3*len(s.index)
}

// rebuild copies what is live into a new state that has room for a quarter more, and
// for a record of n bytes at least. The caller holds mu.
func (sh *shard) rebuild(t *Table, old *state, n int) *state {
	need := firstUnit<<minShift + n
	if old != nil {
		need += sh.used - sh.dead
	}
	size := need + max(need/4, minRoom)
	next := &state{shift: minShift}
	for roundUp(size, next.shift)>>next.shift > placeMask {
		next.shift++
		// Records start at a unit: each may take one more at most.
		size = need + need/4 + (sh.live+1)<<next.shift + firstUnit<<next.shift
	}
	slots := minSlots
	for 4*(sh.live+1+sh.live/8) > 3*slots {
		slots *= 2
	}
	next.index, next.arena = make([]uint32, slots), make([]byte, roundUp(size, next.shift))
	used := firstUnit << next.shift
	if old != nil {
		for i := range old.index {
			v := old.index[i] // nobody but this writer writes it
			if v == slotEmpty || v == slotDeleted {
				continue
			}
			rec := old.arena[int(v&placeMask)<<old.shift:]
			key := rec[1 : 1+int(rec[0])]
			rec = rec[:recordLen(rec[1+len(key):], len(key))]
			copy(next.arena[used:], rec)
			h := maphash.Bytes(t.seed, key)
			next.insert(h, tagOf(h)|uint32(used>>next.shift))
			used += roundUp(len(rec), next.shift)
		}
	}
	sh.used, sh.dead, sh.taken = used, 0, sh.live
	sh.state.Store(next)
	return next
}

// insert puts v into the first empty slot; the key is in none.
func (s *state) insert(h uint64, v uint32) {
	mask := uint64(len(s.index) - 1)
	for i := h & mask; ; i = (i + 1) & mask {
		if s.index[i] == slotEmpty {
			atomic.StoreUint32(&s.index[i], v)
			return
		}
	}
}

func roundUp(n int, shift uint8) int { return (n + 1<<shift - 1) &^ (1<<shift - 1) }

func encode(b []byte, key string, r Record) []byte {
	b = append(b, byte(len(key)))
	b = append(b, key...)
	b = append(b, r.Kind)
	b = binary.AppendUvarint(b, uint64(r.Cell))
	b = binary.AppendUvarint(b, r.Epoch)
	b = binary.AppendUvarint(b, r.Epoch-r.Floor)
	return binary.AppendUvarint(b, r.Revision)
}

// decode reads what follows the key.
func decode(b []byte) Record {
	r := Record{Kind: b[0]}
	b = b[1:]
	cell, n := uvarint(b)
	b = b[n:]
	epoch, n := uvarint(b)
	b = b[n:]
	below, n := uvarint(b)
	b = b[n:]
	r.Revision, _ = uvarint(b)
	r.Cell, r.Epoch, r.Floor = uint32(cell), epoch, epoch-below
	return r
}

// uvarint is short for small numbers, which most are.
func uvarint(b []byte) (uint64, int) {
	if b[0] < 0x80 {
		return uint64(b[0]), 1
	}
	return binary.Uvarint(b)
}

// recordLen is the length of the record whose key has n bytes and is followed by b.
func recordLen(b []byte, n int) int {
	at := 1
	for range 4 {
		for b[at] >= 0x80 {
			at++
		}
		at++
	}
	return 1 + n + at
}
