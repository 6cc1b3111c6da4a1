// SPDX-License-Identifier: Apache-2.0

package packed

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"pgregory.net/rapid"
)

// Whatever is done to a table, it answers as a map does.
func TestAsAMap(t *testing.T) {
	keys := rapid.OneOf(
		rapid.Map(rapid.IntRange(0, 40), func(n int) string { return fmt.Sprint("tenant-", n) }),
		rapid.StringN(0, 20, 80), rapid.Map(rapid.IntRange(200, maxKey), func(n int) string { return strings.Repeat("k", n) }))
	number := rapid.OneOf(rapid.Uint64Range(0, 300), rapid.Uint64())
	rapid.Check(t, func(rt *rapid.T) {
		table, model := New(), map[string]Record{}
		rt.Repeat(map[string]func(*rapid.T){
			"put": func(rt *rapid.T) {
				key := keys.Draw(rt, "key")
				r := Record{Kind: rapid.Uint8().Draw(rt, "kind"), Cell: rapid.Uint32().Draw(rt, "cell"), Epoch: number.Draw(rt, "epoch"), Revision: number.Draw(rt, "revision")}
				r.Floor = rapid.Uint64Range(0, r.Epoch).Draw(rt, "floor")
				table.Put(key, r)
				model[key] = r
			},
			"delete": func(rt *rapid.T) {
				key := keys.Draw(rt, "key")
				_, want := model[key]
				if table.Delete(key) != want {
					rt.Fatalf("deleting %q: want %t", key, want)
				}
				delete(model, key)
			},
			"get": func(rt *rapid.T) {
				key := keys.Draw(rt, "key")
				want, there := model[key]
				if got, ok := table.Get(key); ok != there || got != want {
					rt.Fatalf("%q is %+v, %t; want %+v, %t", key, got, ok, want, there)
				}
			},
			"": func(rt *rapid.T) {
				all := map[string]Record{}
				table.Each(func(key string, r Record) bool { all[key] = r; return true })
				if !maps.Equal(all, model) || table.Len() != len(model) {
					rt.Fatalf("the table has %d keys and says %d, the map %d", len(all), table.Len(), len(model))
				}
			},
		})
	})
}

// Many keys, changed and deleted over and over, take no more memory than what is
// live and a bounded part of it.
func TestReclaims(t *testing.T) {
	table := New()
	const n = 12_000
	key := func(i int) string { return fmt.Sprintf("tenant-%08d", i) }
	for i := range n {
		table.Put(key(i), Record{Epoch: 1, Floor: 1, Revision: uint64(i)})
	}
	perKey := float64(table.Bytes()) / n
	// 1+15+1+1+1+1+3 bytes of a record, a quarter of room, up to 4/0.375 of index.
	if perKey > 52 {
		t.Errorf("%.1f bytes a key", perKey)
	}
	for round := range 5 {
		for i := range n {
			table.Put(key(i), Record{Epoch: uint64(round), Floor: uint64(round), Revision: uint64(round*n + i)})
		}
	}
	if now := float64(table.Bytes()) / n; now > 1.3*perKey {
		t.Errorf("%.1f bytes a key after changes, %.1f before", now, perKey)
	}
	for i := range n - 10 {
		if !table.Delete(key(i)) {
			t.Fatal(i)
		}
	}
	// Others come and go; what is left of the first is dropped on the way.
	for i := range 3 * n {
		table.Put("x"+key(i), Record{})
		table.Delete("x" + key(i))
	}
	if now := table.Bytes(); now > int(perKey*n/4) {
		t.Errorf("%d bytes are left for 10 keys", now)
	}
	for i := n - 10; i < n; i++ {
		if r, ok := table.Get(key(i)); !ok || r.Revision != uint64(4*n+i) {
			t.Errorf("%s is %+v, %t", key(i), r, ok)
		}
	}
}

// A shard that is too large for its units takes larger ones.
func TestLargerUnits(t *testing.T) {
	table := New()
	sh := &table.shards[0]
	// As if the shard had almost as much as units of four bytes reach.
	sh.state.Store(&state{index: make([]uint32, minSlots), arena: make([]byte, 0), shift: minShift})
	sh.used = placeMask<<minShift - 64
	next := sh.rebuild(table, sh.state.Load(), 100)
	if next.shift <= minShift || len(next.arena)>>next.shift > placeMask+1 {
		t.Fatalf("shift %d, %d bytes", next.shift, len(next.arena))
	}
	for i := range 1000 {
		table.Put(fmt.Sprint("t", i), Record{Kind: 1, Epoch: math.MaxUint64, Floor: 1, Revision: uint64(i)})
	}
	for i := range 1000 {
		if r, ok := table.Get(fmt.Sprint("t", i)); !ok || r.Revision != uint64(i) || r.Floor != 1 || r.Epoch != math.MaxUint64 {
			t.Fatalf("t%d: %+v %t", i, r, ok)
		}
	}
}

// Readers beside writers see each key's revisions go forward, whole records, and
// every key that is there throughout.
func TestReadersBesideWriters(t *testing.T) {
	table := New()
	const keys, changes = 100, 15_000
	name := func(i int) string { return fmt.Sprint("tenant-", i) }
	record := func(rev uint64) Record {
		return Record{Kind: uint8(rev), Cell: uint32(rev % 1000), Epoch: 3 * rev, Floor: 2 * rev, Revision: rev}
	}
	for i := range keys {
		table.Put(name(i), record(0))
	}
	var done atomic.Bool
	var readers, writers sync.WaitGroup
	for range 3 {
		readers.Go(func() {
			seen := make([]uint64, keys)
			for n := 0; !done.Load() || n < keys; n++ {
				i := rand.IntN(keys)
				r, ok := table.Get(name(i))
				if !ok || r != record(r.Revision) || r.Revision < seen[i] {
					t.Errorf("%s: %+v, %t after revision %d", name(i), r, ok, seen[i])
					return
				}
				seen[i] = r.Revision
				if n%5000 == 0 {
					count := 0
					table.Each(func(key string, r Record) bool {
						if strings.HasPrefix(key, "tenant-") {
							count++
						}
						return true
					})
					if count != keys {
						t.Errorf("%d of %d keys are listed", count, keys)
						return
					}
				}
			}
		})
	}
	for w := range 2 {
		writers.Go(func() {
			for n := range uint64(changes) {
				i := 2*rand.IntN(keys/2) + w
				r, _ := table.Get(name(i))
				table.Put(name(i), record(r.Revision+1))
				if n%3 == 0 { // others come and go between them
					other := fmt.Sprint("other-", w, n%100)
					table.Put(other, record(n))
					table.Delete(other)
				}
			}
		})
	}
	writers.Wait()
	done.Store(true)
	readers.Wait()
}

func TestPutRefuses(t *testing.T) {
	for name, f := range map[string]func(){
		"a long key":        func() { New().Put(strings.Repeat("k", maxKey+1), Record{}) },
		"a floor above all": func() { New().Put("k", Record{Floor: 1}) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s was taken", name)
				}
			}()
			f()
		}()
	}
}
