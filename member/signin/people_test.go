// SPDX-License-Identifier: Apache-2.0

package signin_test

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/signin"
	"github.com/cloister-dev/cloister/member/signin/sqlite"
)

// crowd is a cell's people, on a real store.
type crowd struct {
	*testing.T
	store signin.Store
	need  signin.Need
	now   time.Time
	*signin.Check
}

func newCrowd(t *testing.T) *crowd {
	s, err := sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "s.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	c := &crowd{T: t, store: s, need: signin.NeedActive, now: time.Now()}
	if c.Check, err = signin.NewCheck(signin.CheckConfig{Store: s, Need: func(context.Context) (signin.Need, error) { return c.need, nil }, Now: func() time.Time { return c.now }}); err != nil {
		t.Fatal(err)
	}
	return c
}

func (c *crowd) ok(err error) {
	c.Helper()
	if err != nil {
		c.Fatal(err)
	}
}

// provision makes a user; work addresses follow the primary one.
func (c *crowd) provision(email string, work ...string) signin.User {
	c.Helper()
	u := signin.User{Name: email, Email: email, Active: true, Attributes: []byte(`{}`)}
	for _, w := range work {
		k, err := signin.KeyOf(w)
		c.ok(err)
		u.Work = append(u.Work, k)
	}
	u, err := c.store.CreateUser(c.Context(), u)
	c.ok(err)
	return u
}

func (c *crowd) set(u signin.User, active bool) signin.User {
	c.Helper()
	u.Active = active
	u, err := c.store.UpdateUser(c.Context(), u)
	c.ok(err)
	return u
}

// want checks whether a subject is refused.
func (c *crowd) want(what string, refused bool, s signin.Subject) {
	c.Helper()
	switch err := c.Refuses(c.Context(), s); {
	case refused && (!errors.Is(err, signin.ErrRefused) || code(err) != cells.CodeForbidden):
		c.Errorf("%s passes: %v", what, err)
	case !refused && err != nil:
		c.Errorf("%s: %v", what, err)
	}
}

func person(name, email string) signin.Subject {
	return signin.Subject{Issuer: "https://idp", Kind: signin.People, Name: name, Email: email}
}

func TestWhoIsRefused(t *testing.T) {
	c := newCrowd(t)
	ann := c.provision("ann@x.org", "ann@work.org")
	c.want("somebody provisioned", false, person("0a", "ann@x.org"))
	c.want("by another spelling", false, person("0a", "ANN@X.ORG"))
	c.want("by a subject that is the email", false, person("Ann@x.org", ""))
	c.want("nobody knows", true, person("0b", "bob@x.org"))
	c.want("no email", true, person("0a", ""))
	c.want("no email's form", true, person("0a", "x"))
	c.want("a work address alone", true, person("0a", "ann@work.org"))
	c.want("a work address beside the primary", false, person("ann@x.org", "ann@work.org"))
	c.want("another address beside it", true, person("ann@x.org", "ann@private.org"))

	// Not how it is spelled: only the issuer takes somebody out of SCIM.
	for _, spelled := range []string{"user:eve", "machine:eve", "workload:eve", "bot:eve", "sa:", "sa:eve", "SA:eve"} {
		c.want("a person spelled "+spelled, true, person(spelled, ""))
	}
	c.want("an end user", false, signin.Subject{Kind: signin.EndUsers, Name: "user:7"})
	c.want("a machine", false, signin.Subject{Kind: signin.Machines, Name: "node-1"})

	// A row of its own decides, whatever it is a work address of.
	work := c.provision("ann@work.org")
	work = c.set(work, false)
	c.want("a work address that was deactivated", true, person("ann@x.org", "ann@work.org"))
	c.set(work, true)
	c.want("that is active again", false, person("ann@x.org", "ann@work.org"))

	// The person's accounts count, closed ones not.
	c.ok(c.store.RecordAccount(t.Context(), signin.Account{Issuer: "https://idp", Subject: "0a", Emails: []string{"ann@old.org"}}))
	c.want("an account with another email", true, person("0a", "ann@x.org"))
	c.want("that of another issuer", false, signin.Subject{Issuer: "https://other", Name: "0a", Email: "ann@x.org"})
	c.ok(c.store.RecordAccount(t.Context(), signin.Account{Issuer: "https://idp", Subject: "0a", Closed: true}))
	c.want("a closed one", false, person("0a", "ann@x.org"))
	c.ok(c.store.RecordAccount(t.Context(), signin.Account{Issuer: "https://idp", Subject: "0c", Emails: []string{"ann@x.org"}}))
	c.want("a subject whose account has the email", false, person("0c", ""))

	// A deactivation and a deletion end everything of the person.
	ann = c.set(ann, false)
	c.want("deactivated", true, person("0c", "ann@x.org"))
	c.need = signin.NeedNotGone
	c.want("deactivated, in a deployment that is no cell", true, person("0c", "ann@x.org"))
	c.want("never provisioned there", false, person("0b", "bob@x.org"))
	c.want("without an email there", false, person("0z", ""))
	c.need = signin.NeedNothing
	c.want("with SCIM off", false, person("0c", "ann@x.org"))
	c.need = signin.NeedActive
	ann = c.set(ann, true)
	c.want("active again", false, person("0c", ""))
	c.ok(c.store.DeleteUser(t.Context(), ann.ID))
	c.want("deleted", true, person("0c", ""))
	c.provision("ann@x.org")
	c.want("made again", false, person("0c", ""))
}

// A personal service account is its creator and its lineage; a bot is nobody.
func TestServiceAccountsAndBots(t *testing.T) {
	c := newCrowd(t)
	ann := c.provision("ann@x.org")
	bob := c.provision("bob@x.org")
	put := func(name, creator string, lineage ...string) {
		t.Helper()
		c.ok(c.store.PutServiceAccount(t.Context(), signin.ServiceAccount{Name: name, Creator: creator, Lineage: lineage}))
	}
	put("ci", "ann@x.org", "bob@x.org")
	put("deep", "sa:ci")
	put("loop", "sa:loop")
	put("orphan", "eve@x.org")
	c.ok(c.store.PutBot(t.Context(), signin.Bot{Name: "glass", Key: []byte(`{}`), Thumbprint: "p", Admin: true}, signin.Entry{}))
	c.want("through two who are active", false, person("sa:ci", ""))
	c.want("an agent of it", false, person("sa:ci:agent", ""))
	c.want("through another", false, person("sa:deep", ""))
	c.want("through itself", true, person("sa:loop", ""))
	c.want("of nobody provisioned", true, person("sa:orphan", ""))
	c.want("a bot", false, person("sa:glass", ""))
	c.want("a bot's agent", false, person("sa:glass:worker:2", ""))
	bob = c.set(bob, false)
	c.want("one of the lineage is gone", true, person("sa:ci", ""))
	c.want("below it too", true, person("sa:deep", ""))
	c.set(bob, true)
	c.set(ann, false)
	c.want("the creator is gone", true, person("sa:ci", ""))
	c.want("a bot, when everybody is gone", false, person("sa:glass", ""))
	c.ok(c.store.PutBot(t.Context(), signin.Bot{Name: "glass", Key: []byte(`{}`), Thumbprint: "p", Disabled: true}, signin.Entry{}))
	c.want("a disabled bot", true, person("sa:glass", ""))
}

// Everybody whom a token stands for is checked.
func TestAdmit(t *testing.T) {
	c := newCrowd(t)
	ann := c.provision("ann@x.org")
	c.provision("bob@x.org")
	token := func(change func(*signin.Token)) signin.Token {
		tok := signin.Token{Issuer: "https://idp", Kind: signin.People, Subject: "0a", Email: "ann@x.org", IssuedAt: c.now}
		if change != nil {
			change(&tok)
		}
		return tok
	}
	admit := func(what string, want cells.Code, change func(*signin.Token)) {
		t.Helper()
		if err := c.Admit(t.Context(), token(change)); code(err) != want || (err == nil) != (want == "") {
			t.Errorf("%s: %v, want %s", what, err, want)
		}
	}
	admit("a stranger", cells.CodeForbidden, func(k *signin.Token) { k.Subject, k.Email = "0e", "eve@x.org" })
	if list, err := c.store.AccountsOf(t.Context(), "", "0e"); err != nil || len(list) > 0 {
		t.Errorf("somebody refused has an account: %v, %v", list, err)
	}
	admit("ann", "", nil)
	admit("ann, made by a stranger", cells.CodeForbidden, func(k *signin.Token) { k.Creator = "eve@x.org" })
	admit("ann, made by bob", "", func(k *signin.Token) { k.Creator = "bob@x.org" })
	admit("a stranger for ann", cells.CodeForbidden, func(k *signin.Token) { k.Actors = []string{"eve@x.org"} })
	admit("bob for ann", "", func(k *signin.Token) { k.Actors = []string{"bob@x.org"} })
	admit("an end user", "", func(k *signin.Token) { k.Kind, k.Subject, k.Email = signin.EndUsers, "user:1", "eve@x.org" })
	if list, err := c.store.AccountsOf(t.Context(), "", "0a"); err != nil || len(list) != 1 || len(list[0].Emails) != 1 {
		t.Errorf("ann's account: %+v, %v", list, err)
	}
	// Remembered for a while, and no longer.
	c.set(ann, false)
	admit("just deactivated", "", nil)
	c.now = c.now.Add(6 * time.Second)
	admit("deactivated", cells.CodeForbidden, func(k *signin.Token) { k.IssuedAt = c.now.Add(-6 * time.Second) })

	c.need = signin.NeedNothing
	c.ok(c.store.RevokeAccount(t.Context(), "https://idp", "0a", c.now))
	admit("issued before the revocation", cells.CodeUnauthenticated, func(k *signin.Token) { k.IssuedAt = c.now.Add(-time.Second) })
	admit("that does not say when", cells.CodeUnauthenticated, func(k *signin.Token) { k.IssuedAt = time.Time{} })
	admit("issued after it", "", nil)

	// A store that does not answer refuses nobody and passes nobody.
	c.ok(c.store.Close())
	c.now = c.now.Add(time.Hour)
	admit("no store", cells.CodeAuthUnavailable, nil)
}

// Somebody whose email changes goes on with the new one, and with it alone.
func TestAnotherEmail(t *testing.T) {
	c := newCrowd(t)
	ann := c.provision("ann@x.org")
	token := signin.Token{Issuer: "https://idp", Kind: signin.People, Subject: "0a", Email: "ann@x.org", IssuedAt: c.now}
	c.ok(c.Admit(t.Context(), token))
	ann.Email = "ann@y.org"
	c.set(ann, true)
	c.now = c.now.Add(time.Minute)
	c.want("the email before", true, person("0a", "ann@x.org"))
	c.want("the new email", false, person("0a", "ann@y.org"))
	c.want("no email in the token", true, person("0b", ""))
	token.Email, token.IssuedAt = "ann@y.org", c.now
	c.ok(c.Admit(t.Context(), token))
}

// What attach asks: who would be refused, and the end of their tokens.
func TestUnprovisioned(t *testing.T) {
	c := newCrowd(t)
	c.provision("ann@x.org")
	for _, a := range []signin.Account{{Issuer: "i", Subject: "ann@x.org"}, {Issuer: "i", Subject: "bob", Emails: []string{"bob@x.org"}}, {Issuer: "i", Subject: "carl"},
		{Issuer: "i", Subject: "dora", Closed: true}, {Issuer: "i", Subject: "eve", LastIssued: c.now, Revoked: c.now.Add(time.Second)}} {
		a.LastIssued = c.now
		c.ok(c.store.RecordAccount(t.Context(), a))
	}
	c.ok(c.store.PutServiceAccount(t.Context(), signin.ServiceAccount{Name: "ci", Creator: "bob@x.org"}))
	c.ok(c.store.PutServiceAccount(t.Context(), signin.ServiceAccount{Name: "good", Creator: "ann@x.org"}))
	names := func() (out string) {
		t.Helper()
		list, err := signin.ListUnprovisioned(t.Context(), c.store)
		c.ok(err)
		for _, u := range list {
			out += u.Subject + " "
		}
		return out
	}
	if got := names(); got != "bob carl sa:ci " {
		t.Errorf("unprovisioned: %s", got)
	}
	list, err := signin.ListUnprovisioned(t.Context(), c.store)
	c.ok(err)
	before := c.now.Add(time.Minute)
	for range 2 {
		c.ok(signin.Revoke(t.Context(), c.store, list, before))
	}
	if got := names(); got != "" {
		t.Errorf("after the revocation: %s", got)
	}
	c.need = signin.NeedNothing
	for _, s := range []signin.Subject{{Issuer: "i", Name: "bob", IssuedAt: before.Add(-time.Second)}, {Name: "sa:ci", IssuedAt: before.Add(-time.Second)}} {
		if err := c.Refuses(t.Context(), s); code(err) != cells.CodeUnauthenticated {
			t.Errorf("%s goes on: %v", s.Name, err)
		}
	}
	if err := c.Refuses(t.Context(), signin.Subject{Issuer: "i", Name: "ann@x.org", IssuedAt: c.now}); err != nil {
		t.Errorf("somebody else: %v", err)
	}
}

func TestEmails(t *testing.T) {
	for in, want := range map[string]string{"A@X.org": "a@x.org", "ü@x.org": "ü@x.org", "u\u0308@x.org": "ü@x.org", "a@BÜCHER.example": "a@xn--bcher-kva.example", "a+b@x.org": "a+b@x.org"} {
		if got, err := signin.NormalEmail(in); err != nil || got != want {
			t.Errorf("%q: %q, %v", in, got, err)
		}
	}
	for _, bad := range []string{"", "a", "@x.org", "a@", "a@x", "a@@x.org", "a@x.org@y", "a b@x.org", "a@x.org ", "a\n@x.org", "a@x.org:25", "a@[1.2.3.4]", "\"a\"@x.org", "a@\xff.org"} {
		if got, err := signin.NormalEmail(bad); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%q is read as %q", bad, got)
		}
	}
}

// FuzzEmail: what is normal stays as it is.
func FuzzEmail(f *testing.F) {
	for _, s := range []string{"a@x.org", "A@X.ORG", "ü@bücher.example", "İ@x.org", "ß@x.org", "\u212a@x.org", "a@1.2.3.4"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, err := signin.NormalEmail(s)
		if err != nil {
			return
		}
		if again, err := signin.NormalEmail(n); err != nil || again != n {
			t.Fatalf("%q becomes %q, and that %q, %v", s, n, again, err)
		}
	})
}
