// SPDX-License-Identifier: Apache-2.0

// Package signintest is the conformance suite of signin.Store: what each variant does,
// on the real thing. The store under test is authoritative and has to be empty; a
// failure leaves it as it is.
package signintest

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/signin"
)

// T is what the suite needs of a test.
type T interface {
	Helper()
	Context() context.Context
	Error(args ...any)
	Errorf(format string, args ...any)
	Fatal(args ...any) // ends the goroutine
}

// Cases are the suite's, by name; each wants an empty store.
func Cases() map[string]func(T, signin.Store) {
	return map[string]func(T, signin.Store){
		"Users": users, "Emails": emails, "OneWinner": oneWinner, "Groups": groups, "Accounts": accounts, "ServiceAccounts": serviceAccounts, "Bots": bots, "ChallengesOnce": once,
	}
}

// Run runs the suite; open makes an empty store, which the test closes.
func Run(t *testing.T, open func(t *testing.T) signin.Store) {
	for name, f := range Cases() {
		t.Run(name, func(t *testing.T) {
			s := open(t)
			t.Cleanup(func() {
				if err := s.Close(); err != nil {
					t.Error(err)
				}
			})
			f(t, s)
		})
	}
}

func must[V any](t T) func(V, error) V {
	return func(v V, err error) V {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func is(t T, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) || want == nil && err != nil {
		t.Errorf("%s: %v, want %v", what, err, want)
	}
}

func key(t T, email string) signin.EmailKey {
	t.Helper()
	return must[signin.EmailKey](t)(signin.KeyOf(email))
}

func user(name, email string) signin.User {
	return signin.User{Name: name, Email: email, Active: true, Attributes: []byte(`{"userName":"` + name + `"}`)}
}

// state is what the store has for emails: active, inactive or none.
func state(t T, s signin.Store, emails ...string) string {
	t.Helper()
	var keys []signin.EmailKey
	for _, e := range emails {
		keys = append(keys, key(t, e))
	}
	rows := must[[]signin.Row](t)(s.Rows(t.Context(), keys))
	out := ""
	for _, k := range keys {
		of := ""
		for _, r := range rows {
			if r.Key == k {
				of += map[bool]string{true: "active", false: "inactive"}[r.Active]
			}
		}
		if of == "" {
			of = "none"
		}
		out += of + " "
	}
	return out
}

func users(t T, s signin.Store) {
	ctx := t.Context()
	ann := must[signin.User](t)(s.CreateUser(ctx, user("Ann", "Ann@Example.com")))
	if ann.ID == "" || ann.Version != 1 || ann.Email != "ann@example.com" || ann.Key != key(t, "ann@example.com") || ann.Created.IsZero() {
		t.Errorf("%+v", ann)
	}
	if got := must[signin.User](t)(s.User(ctx, ann.ID)); !reflect.DeepEqual(got, signin.User{ID: ann.ID, Name: "Ann", Email: ann.Email, Key: ann.Key, Active: true, Attributes: ann.Attributes, Version: 1, Created: ann.Created, Changed: ann.Changed}) {
		t.Errorf("%+v", got)
	}
	if got := must[signin.User](t)(s.UserNamed(ctx, "aNN")); got.ID != ann.ID {
		t.Errorf("%+v", got)
	}
	_, err := s.CreateUser(ctx, user("ann", "other@example.com"))
	is(t, "a name that is taken", err, signin.ErrTaken)
	_, err = s.CreateUser(ctx, user("other", "ann@example.com"))
	is(t, "an email that is taken", err, signin.ErrTaken)
	_, err = s.CreateUser(ctx, user("other", "none"))
	is(t, "no email", err, cells.ErrInvalid)
	bob := must[signin.User](t)(s.CreateUser(ctx, user("bob", "bob@example.com")))
	bob.Email = "ann@example.com"
	_, err = s.UpdateUser(ctx, bob)
	is(t, "an update to an email that is taken", err, signin.ErrTaken)
	ann.Active, ann.External = false, "x"
	next := must[signin.User](t)(s.UpdateUser(ctx, ann))
	if next.Version != 2 || !next.Created.Equal(ann.Created) || next.Active {
		t.Errorf("%+v", next)
	}
	_, err = s.UpdateUser(ctx, ann)
	is(t, "an update of another version", err, signin.ErrChanged)
	ann.ID = "nobody"
	_, err = s.UpdateUser(ctx, ann)
	is(t, "an update of nobody", err, cells.ErrNotFound)
	is(t, "a deletion of nobody", s.DeleteUser(ctx, "nobody"), cells.ErrNotFound)
	_, err = s.User(ctx, "nobody")
	is(t, "nobody", err, cells.ErrNotFound)
	var ids []string
	for after := ""; ; {
		list := must[[]signin.User](t)(s.Users(ctx, after, 1))
		if len(list) == 0 {
			break
		}
		after = list[0].ID
		ids = append(ids, after)
	}
	if len(ids) != 2 || !slices.IsSorted(ids) {
		t.Errorf("listed %v", ids)
	}
}

func emails(t T, s signin.Store) {
	ctx := t.Context()
	if got := state(t, s, "a@x.org"); got != "none " {
		t.Errorf("never provisioned: %s", got)
	}
	u := user("a", "a@x.org")
	u.Work = []signin.EmailKey{key(t, "w@x.org"), key(t, "w@x.org"), key(t, "v@x.org")}
	u = must[signin.User](t)(s.CreateUser(ctx, u))
	if got := must[[]signin.EmailKey](t)(s.WorkOf(ctx, key(t, "w@x.org"))); len(got) != 1 || got[0] != u.Key {
		t.Errorf("work: %v", got)
	}
	u.Active, u.Work = false, u.Work[:1]
	u = must[signin.User](t)(s.UpdateUser(ctx, u))
	if got := state(t, s, "a@x.org", "b@x.org"); got != "inactive none " {
		t.Errorf("deactivated: %s", got)
	}
	if got := must[[]signin.EmailKey](t)(s.WorkOf(ctx, key(t, "w@x.org"))); len(got) != 0 {
		t.Errorf("work of an inactive user: %v", got)
	}
	// Another email: the one that is left is deleted.
	u.Email, u.Active = "b@x.org", true
	u = must[signin.User](t)(s.UpdateUser(ctx, u))
	if got := state(t, s, "a@x.org", "b@x.org"); got != "inactive active " {
		t.Errorf("renamed: %s", got)
	}
	if got := must[[]signin.EmailKey](t)(s.WorkOf(ctx, key(t, "v@x.org"))); len(got) != 0 {
		t.Errorf("an address that was taken out: %v", got)
	}
	// The old email for somebody else, and the deletion of both.
	other := must[signin.User](t)(s.CreateUser(ctx, user("c", "a@x.org")))
	if got := state(t, s, "a@x.org", "b@x.org"); got != "active active " {
		t.Errorf("given away: %s", got)
	}
	is(t, "delete", s.DeleteUser(ctx, other.ID), nil)
	is(t, "delete", s.DeleteUser(ctx, u.ID), nil)
	is(t, "delete again", s.DeleteUser(ctx, u.ID), cells.ErrNotFound)
	if got := state(t, s, "a@x.org", "b@x.org", "w@x.org"); got != "inactive inactive none " {
		t.Errorf("deleted: %s", got)
	}
	again := must[signin.User](t)(s.CreateUser(ctx, user("a", "b@x.org")))
	if got := state(t, s, "b@x.org"); got != "active " || again.ID == u.ID {
		t.Errorf("made again: %s, %s", got, again.ID)
	}
	again.Email = "a@x.org"
	must[signin.User](t)(s.UpdateUser(ctx, again))
	if got := state(t, s, "a@x.org", "b@x.org"); got != "active inactive " {
		t.Errorf("renamed to a deleted one: %s", got)
	}
}

func oneWinner(t T, s signin.Store) {
	var made, taken atomic.Int64
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			_, err := s.CreateUser(t.Context(), user(fmt.Sprint("u", i), "same@x.org"))
			switch {
			case err == nil:
				made.Add(1)
			case errors.Is(err, signin.ErrTaken):
				taken.Add(1)
			default:
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if made.Load() != 1 || taken.Load() != 7 {
		t.Errorf("%d made, %d refused", made.Load(), taken.Load())
	}
	u := must[[]signin.User](t)(s.Users(t.Context(), "", 10))[0]
	var changed atomic.Int64
	for range 8 {
		wg.Go(func() {
			switch _, err := s.UpdateUser(t.Context(), u); {
			case err == nil:
				changed.Add(1)
			case !errors.Is(err, signin.ErrChanged):
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if changed.Load() != 1 {
		t.Errorf("%d updates of one version", changed.Load())
	}
}

func groups(t T, s signin.Store) {
	ctx := t.Context()
	g := must[signin.Group](t)(s.CreateGroup(ctx, signin.Group{Tenant: "t1", Name: "Admins", Attributes: []byte(`{}`)}))
	_, err := s.CreateGroup(ctx, signin.Group{Tenant: "t1", Name: "admins", Attributes: []byte(`{}`)})
	is(t, "a name that is taken", err, signin.ErrTaken)
	must[signin.Group](t)(s.CreateGroup(ctx, signin.Group{Tenant: "t2", Name: "admins", Attributes: []byte(`{}`)}))
	_, err = s.Group(ctx, "t2", g.ID)
	is(t, "a group of another tenant", err, cells.ErrNotFound)
	is(t, "its deletion", s.DeleteGroup(ctx, "t2", g.ID), cells.ErrNotFound)
	wrong := g
	wrong.Tenant = "t2"
	_, err = s.UpdateGroup(ctx, wrong)
	is(t, "its update", err, cells.ErrNotFound)
	g.Attributes = []byte(`{"members":[]}`)
	must[signin.Group](t)(s.UpdateGroup(ctx, g))
	_, err = s.UpdateGroup(ctx, g)
	is(t, "an update of another version", err, signin.ErrChanged)
	if got := must[signin.Group](t)(s.Group(ctx, "t1", g.ID)); got.Version != 2 || string(got.Attributes) != `{"members":[]}` || got.Name != "Admins" {
		t.Errorf("%+v", got)
	}
	if got := must[[]signin.Group](t)(s.Groups(ctx, "t1", "", 10)); len(got) != 1 {
		t.Errorf("%+v", got)
	}
	_, err = s.CreateGroup(ctx, signin.Group{Tenant: "", Name: "x", Attributes: []byte(`{}`)})
	is(t, "a group of no tenant", err, cells.ErrInvalid)
	is(t, "delete", s.DeleteGroup(ctx, "t1", g.ID), nil)
	is(t, "delete again", s.DeleteGroup(ctx, "t1", g.ID), cells.ErrNotFound)
}

func accounts(t T, s signin.Store) {
	ctx := t.Context()
	early := time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC)
	late := early.Add(time.Hour)
	put := func(a signin.Account) {
		t.Helper()
		is(t, "record", s.RecordAccount(ctx, a), nil)
	}
	put(signin.Account{Issuer: "i", Subject: "ann", Emails: []string{"Ann@x.org"}, LastIssued: late})
	put(signin.Account{Issuer: "i", Subject: "ann", Emails: []string{"b@x.org", "ann@x.org"}, LastIssued: early})
	put(signin.Account{Issuer: "j", Subject: "ann"})
	put(signin.Account{Issuer: "i", Subject: "bob"})
	one := must[[]signin.Account](t)(s.AccountsOf(ctx, "i", "ann"))
	if want := (signin.Account{Issuer: "i", Subject: "ann", Emails: []string{"ann@x.org", "b@x.org"}, LastIssued: late}); len(one) != 1 || !reflect.DeepEqual(one[0], want) {
		t.Errorf("%+v", one)
	}
	if any := must[[]signin.Account](t)(s.AccountsOf(ctx, "", "ann")); len(any) != 2 {
		t.Errorf("%+v", any)
	}
	is(t, "revoke", s.RevokeAccount(ctx, "i", "ann", late.Add(time.Second)), nil)
	is(t, "revoke earlier", s.RevokeAccount(ctx, "i", "ann", early), nil)
	is(t, "revoke nobody", s.RevokeAccount(ctx, "i", "eve", early), cells.ErrNotFound)
	if one = must[[]signin.Account](t)(s.AccountsOf(ctx, "i", "ann")); !one[0].Revoked.Equal(late.Add(time.Second)) || one[0].Live() {
		t.Errorf("%+v", one)
	}
	put(signin.Account{Issuer: "i", Subject: "ann", LastIssued: late.Add(time.Minute)})
	if one = must[[]signin.Account](t)(s.AccountsOf(ctx, "i", "ann")); !one[0].Live() || one[0].Revoked.IsZero() {
		t.Errorf("%+v", one)
	}
	put(signin.Account{Issuer: "i", Subject: "ann", Closed: true})
	put(signin.Account{Issuer: "i", Subject: "ann"})
	if one = must[[]signin.Account](t)(s.AccountsOf(ctx, "i", "ann")); one[0].Live() {
		t.Errorf("%+v", one)
	}
	// Accounts follow a person to another email, and to one that they have.
	put(signin.Account{Issuer: "k", Subject: "cy", Emails: []string{"cy@x.org", "c@x.org"}})
	put(signin.Account{Issuer: "k", Subject: "dan", Emails: []string{"dan@x.org"}})
	cy := must[signin.User](t)(s.CreateUser(ctx, user("cy", "Cy@x.org")))
	for _, next := range []struct{ email, want string }{{"cy@y.org", "c@x.org cy@y.org"}, {"c@x.org", "c@x.org"}} {
		cy.Email = next.email
		cy = must[signin.User](t)(s.UpdateUser(ctx, cy))
		if got := must[[]signin.Account](t)(s.AccountsOf(ctx, "k", "cy")); strings.Join(got[0].Emails, " ") != next.want {
			t.Errorf("after %s: %+v", next.email, got)
		}
	}
	if got := must[[]signin.Account](t)(s.AccountsOf(ctx, "k", "dan")); strings.Join(got[0].Emails, " ") != "dan@x.org" {
		t.Errorf("another's: %+v", got)
	}
	n := 0
	for after := (signin.Account{}); ; n++ {
		list := must[[]signin.Account](t)(s.Accounts(ctx, after, 1))
		if len(list) == 0 {
			break
		}
		after = list[0]
	}
	if n != 5 {
		t.Errorf("%d accounts are listed", n)
	}
	is(t, "nobody", s.RecordAccount(ctx, signin.Account{Issuer: "i"}), cells.ErrInvalid)
}

func serviceAccounts(t T, s signin.Store) {
	ctx := t.Context()
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	is(t, "put", s.PutServiceAccount(ctx, signin.ServiceAccount{Name: "x", Creator: "ann", Lineage: []string{"bob"}}), nil)
	is(t, "revoke", s.RevokeServiceAccount(ctx, "x", at), nil)
	is(t, "put again", s.PutServiceAccount(ctx, signin.ServiceAccount{Name: "x", Creator: "carl"}), nil)
	got := must[signin.ServiceAccount](t)(s.ServiceAccount(ctx, "x"))
	if got.Creator != "carl" || len(got.Lineage) != 0 || !got.Revoked.Equal(at) || got.Created.IsZero() {
		t.Errorf("%+v", got)
	}
	_, err := s.ServiceAccount(ctx, "y")
	is(t, "nobody", err, cells.ErrNotFound)
	is(t, "revoke nobody", s.RevokeServiceAccount(ctx, "y", at), cells.ErrNotFound)
	if list := must[[]signin.ServiceAccount](t)(s.ServiceAccounts(ctx, "", 10)); len(list) != 1 {
		t.Errorf("%+v", list)
	}
}

func hash(s string) [32]byte { return sha256.Sum256([]byte(s)) }

func actions(t T, s signin.Store) (out []string) {
	t.Helper()
	for _, e := range must[[]signin.Entry](t)(s.Audit(t.Context(), "", 100)) {
		out = append(out, e.Actor+" "+e.Action)
	}
	return out
}

func bots(t T, s signin.Store) {
	ctx := t.Context()
	b := signin.Bot{Name: "glass", Key: []byte(`{"kty":"x"}`), Thumbprint: "p1", Admin: true}
	is(t, "put", s.PutBot(ctx, b, signin.Entry{Actor: "op", Action: "made"}), nil)
	is(t, "another with its key", s.PutBot(ctx, signin.Bot{Name: "other", Key: b.Key, Thumbprint: "p1"}, signin.Entry{}), signin.ErrTaken)
	if got := must[signin.Bot](t)(s.Bot(ctx, "glass")); string(got.Key) != string(b.Key) || !got.Admin || got.Disabled || got.Thumbprint != "p1" {
		t.Errorf("%+v", got)
	}
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC).AddDate(100, 0, 0)
	soon := now.Add(time.Minute)
	is(t, "challenge", s.Challenge(ctx, hash("c"), "glass", soon), nil)
	answer := func(challenge, bot string, at time.Time) error {
		return s.Answered(ctx, hash(challenge), bot, at, hash("token"), soon, signin.Entry{Actor: "sa:glass", Action: "token"})
	}
	is(t, "another challenge", answer("d", "glass", now), cells.ErrNotFound)
	is(t, "of another bot", answer("c", "other", now), cells.ErrNotFound)
	is(t, "expired", answer("c", "glass", soon), cells.ErrNotFound)
	is(t, "in time", answer("c", "glass", now), nil)
	is(t, "a second time", answer("c", "glass", now), cells.ErrNotFound)
	use := func(token string, at time.Time) error {
		_, err := s.BotToken(ctx, hash(token), at, signin.Entry{Action: "used"})
		return err
	}
	is(t, "use", use("token", now), nil)
	is(t, "another token", use("x", now), cells.ErrNotFound)
	is(t, "an expired one", use("token", soon), cells.ErrNotFound)
	if got := actions(t, s); !slices.Equal(got, []string{"op made", "sa:glass token", "sa:glass used"}) {
		t.Errorf("audit: %q", got)
	}
	// Another key closes what the one before it opened.
	b.Thumbprint = "p2"
	is(t, "challenge", s.Challenge(ctx, hash("e"), "glass", soon), nil)
	is(t, "put", s.PutBot(ctx, b, signin.Entry{Actor: "op", Action: "rekeyed"}), nil)
	is(t, "the token of the key before", use("token", now), cells.ErrNotFound)
	is(t, "the challenge of the key before", answer("e", "glass", now), cells.ErrNotFound)
	if list := must[[]signin.Bot](t)(s.Bots(ctx)); len(list) != 1 || list[0].Thumbprint != "p2" {
		t.Errorf("%+v", list)
	}
}

func once(t T, s signin.Store) {
	soon := time.Now().Add(time.Hour)
	is(t, "put", s.PutBot(t.Context(), signin.Bot{Name: "b", Key: []byte(`{}`), Thumbprint: "p"}, signin.Entry{}), nil)
	is(t, "challenge", s.Challenge(t.Context(), hash("c"), "b", soon), nil)
	var good atomic.Int64
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			switch err := s.Answered(context.WithoutCancel(t.Context()), hash("c"), "b", time.Now(), hash(fmt.Sprint(i)), soon, signin.Entry{Action: "token"}); {
			case err == nil:
				good.Add(1)
			case !errors.Is(err, cells.ErrNotFound):
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if good.Load() != 1 || len(actions(t, s)) != 2 {
		t.Errorf("%d tokens for one challenge; %q", good.Load(), actions(t, s))
	}
}
