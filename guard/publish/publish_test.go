// SPDX-License-Identifier: Apache-2.0

package publish_test

import (
	"context"
	"encoding/json"
	"errors"
	"reflect"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/publish"
)

func TestEncode(t *testing.T) {
	e := guard.Event{Tenant: "a.b", Seq: 7, Epoch: 3, Cell: "c", ID: "id-7", Type: "put", Payload: json.RawMessage(`{"k":"v"}`), At: time.Unix(1700000000, 0).UTC()}
	b, err := publish.Encode(e)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := publish.Decode(b); err != nil || !reflect.DeepEqual(got, e) {
		t.Errorf("decoded %+v, %v", got, err)
	}
	got := map[string]string{}
	publish.Headers(e, func(k, v string) { got[k] = v })
	want := map[string]string{"event-id": "id-7", "event-tenant": "a.b", "event-seq": "7", "event-epoch": "3", "event-cell": "c"}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("headers %v", got)
	}
	for _, bad := range []guard.Event{{}, {Tenant: "a", Seq: 1}, {Tenant: "a", ID: "x"}, {Tenant: "a/b", Seq: 1, ID: "x"}, {Tenant: "a", Seq: 1, ID: "x", Payload: json.RawMessage("{")}} {
		if _, err := publish.Encode(bad); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	for _, bad := range []string{"", "{}", `{"tenant":"a","event_seq":1}`, `{"tenant":"a","event_seq":-1,"id":"x"}`} {
		if _, err := publish.Decode([]byte(bad)); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

func TestSettle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, end := context.WithCancelCause(t.Context())
		s, cancel := publish.Settle(ctx, time.Second)
		start := time.Now()
		end(guard.ErrPaused)
		synctest.Wait()
		if s.Err() != nil {
			t.Error("ended with its parent")
		}
		<-s.Done()
		if d := time.Since(start); d != time.Second || !errors.Is(context.Cause(s), guard.ErrPaused) {
			t.Errorf("ended after %s with %v", d, context.Cause(s))
		}
		cancel()

		ctx, end = context.WithCancelCause(t.Context())
		s, cancel = publish.Settle(ctx, time.Hour)
		end(guard.ErrPaused)
		synctest.Wait()
		cancel() // before the grace is over: nothing is left running
		if s.Err() == nil {
			t.Error("not ended by cancel")
		}
		_, cancel = publish.Settle(t.Context(), time.Hour)
		cancel()
	})
}
