// SPDX-License-Identifier: Apache-2.0

package transfertest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
)

// Tables are the tenant tables of the suite: items with a second unique column,
// and parts that refer to them and go with them.
var Tables = []guard.Table{{Name: "item", TenantColumn: "tenant"}, {Name: "part", TenantColumn: "org"}}

// Schema returns the statements that make the tables, for "postgres" or "sqlite".
func Schema(engine string) []string {
	blob, doc, num, at, gen := "bytea", "jsonb", "numeric", "timestamptz", ", twice bigint GENERATED ALWAYS AS (n * 2) STORED"
	if engine == "sqlite" {
		blob, doc, num, at, gen = "blob", "text", "numeric", "timestamp", ", twice integer GENERATED ALWAYS AS (n * 2) STORED"
	}
	return []string{
		// The columns are in another order than by name, and the key is not first.
		fmt.Sprintf(`CREATE TABLE item (n bigint, body text, id text NOT NULL, tenant text NOT NULL, slot bigint, data %s, doc %s, amount %s, at %s, ratio double precision, big text%s,
			PRIMARY KEY (tenant, id), UNIQUE (tenant, slot))`, blob, doc, num, at, gen),
		`CREATE TABLE part (item text NOT NULL, org text NOT NULL, no integer NOT NULL, note text, PRIMARY KEY (org, item, no),
			FOREIGN KEY (org, item) REFERENCES item (tenant, id) ON DELETE CASCADE)`,
	}
}

// odd is text that encodings, quotings and separators stumble over.
var odd = []string{"", "plain", "tab\tnew\nline\r\\back \\N \\. 'single' \"double\" ,;{}()[]", "žluťoučký kůň 🐎 \u2028 \u00a0", "NULL", "a\u0001b\u007f", strings.Repeat("x", 300)}

func putItem(x Exec, t cells.TenantID, id string, n int64) error {
	var data, doc, amount, at, ratio any
	if n%5 != 0 {
		data = []byte{0, 1, byte(n), '\\', '\n', 0xff, byte(n >> 8)}
		doc = fmt.Sprintf(`{"n": %d, "s": "q\"uo\\te", "a": [1, null, {}]}`, n)
		amount = fmt.Sprintf("%d.%030d", n, n)
		at = fmt.Sprintf("2026-11-%02d 10:%02d:00.%06d+02:00", 1+n%28, n%60, n%1000000)
		ratio = float64(n) / 3
	} else if n%10 == 0 {
		data = []byte{}
	}
	return x(`INSERT INTO item (tenant, id, n, body, slot, data, doc, amount, at, ratio, big) VALUES (?1, ?2, ?3, ?4, NULL, ?5, ?6, ?7, ?8, ?9, ?10)
		ON CONFLICT (tenant, id) DO UPDATE SET n = excluded.n, body = excluded.body, data = excluded.data, doc = excluded.doc, amount = excluded.amount, at = excluded.at, ratio = excluded.ratio, big = excluded.big`,
		string(t), id, n, odd[int(n)%len(odd)], data, doc, amount, at, ratio, nil)
}

// setBig gives an item a value that Postgres stores out of line.
func setBig(x Exec, t cells.TenantID, id string, n uint64) error {
	r := rand.New(rand.NewPCG(n, 7))
	b := make([]byte, 20000)
	for i := range b {
		b[i] = byte('a' + r.IntN(26))
	}
	return x(`UPDATE item SET big = ?3 WHERE tenant = ?1 AND id = ?2`, string(t), id, string(b))
}

func setN(x Exec, t cells.TenantID, id string, n int64) error {
	return x(`UPDATE item SET n = ?3 WHERE tenant = ?1 AND id = ?2`, string(t), id, n)
}

func setSlot(x Exec, t cells.TenantID, id string, slot any) error {
	return x(`UPDATE item SET slot = ?3 WHERE tenant = ?1 AND id = ?2`, string(t), id, slot)
}

func rekeyItem(x Exec, t cells.TenantID, from, to string) error {
	if err := x(`DELETE FROM part WHERE org = ?1 AND item = ?2`, string(t), from); err != nil {
		return err
	}
	return x(`UPDATE item SET id = ?3 WHERE tenant = ?1 AND id = ?2 AND NOT EXISTS (SELECT 1 FROM item o WHERE o.tenant = ?1 AND o.id = ?3)`, string(t), from, to)
}

func deleteItem(x Exec, t cells.TenantID, id string) error {
	return x(`DELETE FROM item WHERE tenant = ?1 AND id = ?2`, string(t), id)
}

func putPart(x Exec, t cells.TenantID, item string, no int, note string) error {
	return x(`INSERT INTO part (org, item, no, note) SELECT ?1, ?2, ?3, ?4 WHERE EXISTS (SELECT 1 FROM item WHERE tenant = ?1 AND id = ?2)
		ON CONFLICT (org, item, no) DO UPDATE SET note = excluded.note`, string(t), item, no, note)
}

// load writes to a tenant until it is stopped, and remembers what was acknowledged.
type load struct {
	w     *world
	stop  chan struct{}
	wg    sync.WaitGroup
	count atomic.Int64
	mu    sync.Mutex // guards acked
	acked map[string]int64
}

// hammer starts writers. Each has keys of its own, so that it knows what they hold.
func (w *world) hammer(writers, keys int) *load {
	l := &load{w: w, stop: make(chan struct{}), acked: map[string]int64{}}
	for n := range writers {
		l.wg.Go(func() { l.write(n, keys) })
	}
	w.tb.Cleanup(l.end)
	return l
}

func (l *load) write(writer, keys int) {
	r := rand.New(rand.NewPCG(uint64(writer), 1))
	ctx := context.WithoutCancel(l.w.tb.Context())
	t := l.w.tenant
	// A service does something between two writes.
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for n := int64(1); ; n++ {
		select {
		case <-l.stop:
			return
		case <-tick.C:
		}
		id := func() string { return fmt.Sprintf("w%d-%03d", writer, r.IntN(keys)) }
		a, b, c := id(), id(), id()
		kind := r.IntN(10)
		event := ""
		if n%3 == 0 {
			event = "written"
		}
		err := l.w.a.Write(ctx, t, base, event, func(x Exec) error {
			if err := putItem(x, t, a, n); err != nil {
				return err
			}
			switch kind {
			case 0:
				return deleteItem(x, t, b)
			case 1:
				return rekeyItem(x, t, b, c)
			case 2:
				return putPart(x, t, b, r.IntN(4), fmt.Sprint(n))
			case 3:
				return setBig(x, t, b, uint64(n))
			case 4:
				return setN(x, t, b, -n)
			case 5:
				if err := setSlot(x, t, b, nil); err != nil {
					return err
				}
				return setSlot(x, t, a, int64(writer)*1_000_000+n)
			case 6:
				// The slot of a goes to b within one transaction.
				if err := setSlot(x, t, a, nil); err != nil {
					return err
				}
				return setSlot(x, t, b, int64(writer)*1_000_000+n)
			}
			return putItem(x, t, fmt.Sprintf("w%d-last", writer), n)
		})
		switch {
		case err == nil:
			l.count.Add(1)
			if kind > 6 {
				l.mu.Lock()
				l.acked[fmt.Sprintf("w%d-last", writer)] = n
				l.mu.Unlock()
			}
		case errors.Is(err, cells.ErrFenced):
			return
		case errors.Is(err, guard.ErrContended), errors.Is(err, cells.ErrUnavailable):
		default:
			l.w.tb.Errorf("write %d of writer %d: %v", n, writer, err)
			return
		}
	}
}

// end stops the writers and waits for them.
func (l *load) end() {
	select {
	case <-l.stop:
	default:
		close(l.stop)
	}
	l.wg.Wait()
}

// reach waits until n more writes were acknowledged.
func (l *load) reach(n int64) {
	l.w.tb.Helper()
	want := l.count.Load() + n
	waitFor(l.w.tb, "writers", func() (bool, string) { return l.count.Load() >= want, fmt.Sprint(l.count.Load()) })
}

// kept fails if an acknowledged write is not among rows.
func (l *load) kept(rows map[string]string) {
	l.w.tb.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	for id, n := range l.acked {
		row, ok := rows[ItemKey(id)]
		if !ok || !strings.Contains(row, fmt.Sprintf("|n=%d|", n)) {
			l.w.tb.Fatalf("acknowledged n=%d of %s is not in %.300q", n, id, row)
		}
	}
}

// ItemKey is the key of an item's row in [Cell.Dump]; its text has "|n=N|".
func ItemKey(id string) string { return "item/" + id }
