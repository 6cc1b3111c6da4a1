// SPDX-License-Identifier: Apache-2.0

package hold

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

func room(t *testing.T, l Limits) *Room {
	t.Helper()
	r, err := NewRoom(l)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func enter(t *testing.T, r *Room, tenant cells.TenantID, n int) (tickets []*Ticket) {
	t.Helper()
	for range n {
		k, err := r.Enter(tenant, 0)
		if err != nil {
			t.Fatalf("%s after %d: %v", tenant, len(tickets), err)
		}
		tickets = append(tickets, k)
	}
	return tickets
}

func TestCountBounds(t *testing.T) {
	r := room(t, Limits{Requests: 64, TenantRequests: 60})
	// The last eighth (8 of 64) is for tenants that hold nothing yet.
	a := enter(t, r, "a", 56)
	if _, err := r.Enter("a", 0); !errors.Is(err, ErrTenantFull) {
		t.Fatalf("a took the reserve: %v", err)
	}
	for i := range 8 {
		enter(t, r, cells.TenantID(fmt.Sprintf("t%d", i)), 1)
	}
	if _, err := r.Enter("z", 0); !errors.Is(err, ErrFull) {
		t.Fatalf("the room has no end: %v", err)
	}
	a[0].Leave()
	a[0].Leave()
	enter(t, r, "z", 1)
	if n, _ := r.Held(); n != 64 {
		t.Fatalf("held %d", n)
	}
}

func TestTenantBoundLeavesOthersAlone(t *testing.T) {
	r := room(t, Limits{Requests: 1000, TenantRequests: 3})
	enter(t, r, "a", 3)
	if _, err := r.Enter("a", 0); !errors.Is(err, ErrTenantFull) {
		t.Fatal(err)
	}
	enter(t, r, "b", 3)
	if r.HeldBy("a") != 3 || r.HeldBy("c") != 0 {
		t.Fatal("the counts are wrong")
	}
}

func TestByteBounds(t *testing.T) {
	r := room(t, Limits{Bytes: 10 * Overhead, TenantBytes: 4 * Overhead})
	k, err := r.Enter("a", 3*Overhead)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Enter("a", 0); !errors.Is(err, ErrTenantFull) {
		t.Fatal(err)
	}
	for _, tenant := range []cells.TenantID{"b", "c"} {
		if _, err := r.Enter(tenant, 2*Overhead); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := r.Enter("d", 0); !errors.Is(err, ErrFull) {
		t.Fatal(err)
	}
	k.Leave()
	if _, err := r.Enter("d", 0); err != nil {
		t.Fatal(err)
	}
}

func TestDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := enter(t, room(t, Limits{Time: 3 * time.Second}), "a", 1)[0]
		if d := time.Until(k.Deadline()); d != 3*time.Second {
			t.Fatal(d)
		}
		<-time.After(time.Second)
		if d := k.Leave(); d != time.Second {
			t.Fatal(d)
		}
	})
}

func TestLimitsRefused(t *testing.T) {
	for _, l := range []Limits{{Requests: -1}, {Bytes: 1}, {TenantBytes: 1}, {TenantRequests: -1}, {Time: -1}} {
		if _, err := NewRoom(l); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%+v: %v", l, err)
		}
	}
}

func TestEmptyAfterUse(t *testing.T) {
	r := room(t, Limits{Requests: 50})
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 500 {
				k, err := r.Enter(cells.TenantID(fmt.Sprint(rand.IntN(5))), rand.Int64N(100))
				if err == nil {
					k.Leave()
				}
			}
		})
	}
	wg.Wait()
	if n, b := r.Held(); n != 0 || b != 0 || len(r.tenants) != 0 {
		t.Fatalf("left over: %d requests, %d bytes, %d tenants", n, b, len(r.tenants))
	}
}
