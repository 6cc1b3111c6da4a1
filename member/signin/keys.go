// SPDX-License-Identifier: Apache-2.0

package signin

import (
	"context"
	"crypto/rsa"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/go-jose/go-jose/v4"

	"github.com/cloister-dev/cloister/cells"
)

// errNoKey: the issuer publishes no key that could have signed the token.
var errNoKey = errors.New("no key of the issuer fits")

// errKeys: the keys of the issuer cannot be had.
var errKeys = errors.New("the keys of the issuer cannot be had")

// keySet is an issuer's keys.
type keySet struct {
	of  *Issuer
	cfg *Config
	// life ends the fetches; running waits for them.
	life    context.Context
	running sync.WaitGroup

	mu      sync.Mutex // guards what follows
	keys    []jose.JSONWebKey
	fetched time.Time     // when the fetch that brought them began
	tried   time.Time     // when the last fetch ended
	failure error         // of the last fetch
	flight  chan struct{} // closed when the fetch that runs ends; nil when none does
}

func (k *keySet) isFile() bool { return k.of.Keys != "" && !strings.Contains(k.of.Keys, "://") }

// fit returns the keys that a token with this header may be signed with.
func (k *keySet) fit(ctx context.Context, kid, alg string) ([]jose.JSONWebKey, error) {
	keys, is := k.state()
	found := match(keys, kid, alg)
	switch {
	case len(found) > 0 && is == fresh:
		return found, nil
	case len(found) > 0 && (is == due || is == failed):
		k.refresh() // beside the request
		return found, nil
	}
	if ch := k.refresh(); ch != nil {
		select {
		case <-ch:
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: %w", errKeys, context.Cause(ctx))
		}
	}
	keys, is = k.state()
	k.mu.Lock()
	failure := k.failure
	k.mu.Unlock()
	found = match(keys, kid, alg)
	switch {
	case len(found) > 0:
		return found, nil // an old set, too: it was not fetched again just now
	case failure != nil:
		// A set that cannot be fetched could have the key by now.
		return nil, fmt.Errorf("%w: %w", errKeys, failure)
	case is == none:
		return nil, errKeys
	}
	return nil, errNoKey
}

// freshness is what may be done with a set.
type freshness int

const (
	none   freshness = iota // there is none that may be used
	fresh                   // it is used
	due                     // used, and fetched again beside the request
	old                     // the request waits for a fetch, and uses it if that fails
	failed                  // old, and a fetch has just failed: used as one that is due
)

// state returns the keys and what they are.
func (k *keySet) state() ([]jose.JSONWebKey, freshness) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.keys == nil {
		return nil, none
	}
	now := k.cfg.Now()
	age := now.Sub(k.fetched)
	keysFor := k.cfg.KeysFor
	if k.isFile() {
		keysFor = min(keysFor, fileFor)
	}
	switch {
	case age >= k.cfg.KeysStale:
		return nil, none
	case age < keysFor/5*4:
		return k.keys, fresh
	case age < keysFor:
		return k.keys, due
	case k.failure != nil && now.Sub(k.tried) < k.every()+k.cfg.FetchTimeout:
		return k.keys, failed
	}
	return k.keys, old
}

// every is the pace of the fetches.
func (k *keySet) every() time.Duration {
	if k.isFile() {
		return min(k.cfg.RefreshEvery, fileFor)
	}
	return k.cfg.RefreshEvery
}

// fileFor is how long a set from a file is used before the file is read again.
const fileFor = 2 * time.Second

// refresh starts a fetch, or joins the one that runs; nil when it is too early for
// another. The channel is closed when the fetch has ended.
func (k *keySet) refresh() <-chan struct{} {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case k.flight != nil:
		return k.flight
	case !k.tried.IsZero() && k.cfg.Now().Sub(k.tried) < k.every(), k.life.Err() != nil:
		return nil
	}
	ended := make(chan struct{})
	k.flight = ended
	k.running.Add(1)
	go func() {
		defer k.running.Done()
		begun := k.cfg.Now()
		ctx, cancel := context.WithTimeout(k.life, k.cfg.FetchTimeout)
		keys, err := k.fetch(ctx)
		cancel()
		k.mu.Lock()
		defer k.mu.Unlock()
		k.tried, k.flight = k.cfg.Now(), nil
		defer close(ended)
		if err != nil {
			if k.failure == nil || k.failure.Error() != err.Error() {
				k.cfg.Log.Error("signin: the keys of an issuer cannot be fetched", "issuer", k.of.Issuer, "err", err)
			}
			k.failure = err
			return
		}
		if k.failure != nil {
			k.cfg.Log.Info("signin: the keys of an issuer were fetched again", "issuer", k.of.Issuer, "keys", len(keys))
		}
		k.keys, k.fetched, k.failure = keys, begun, nil
	}()
	return ended
}

func (k *keySet) fetch(ctx context.Context) ([]jose.JSONWebKey, error) {
	if k.isFile() {
		f, err := os.Open(k.of.Keys)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		return readKeys(f)
	}
	at := k.of.Keys
	if at == "" {
		var d struct {
			Issuer string `json:"issuer"`
			Keys   string `json:"jwks_uri"`
		}
		if err := k.get(ctx, strings.TrimSuffix(k.of.Issuer, "/")+"/.well-known/openid-configuration", func(r io.Reader) error {
			return json.NewDecoder(r).Decode(&d)
		}); err != nil {
			return nil, fmt.Errorf("discovery: %w", err)
		}
		if d.Issuer != k.of.Issuer {
			return nil, fmt.Errorf("discovery: the document is of issuer %.100q", d.Issuer)
		}
		if err := checkAddress(d.Keys); err != nil {
			return nil, fmt.Errorf("discovery: jwks_uri: %w", err)
		}
		if strings.HasPrefix(k.of.Issuer, "https:") && !strings.HasPrefix(d.Keys, "https:") {
			return nil, fmt.Errorf("discovery: jwks_uri: %.100q is not https", d.Keys)
		}
		at = d.Keys
	}
	var keys []jose.JSONWebKey
	err := k.get(ctx, at, func(r io.Reader) (err error) {
		keys, err = readKeys(r)
		return err
	})
	return keys, err
}

// get reads a document. It follows no redirects.
func (k *keySet) get(ctx context.Context, at string, read func(io.Reader) error) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, at, nil)
	if err != nil {
		return err
	}
	req.Header.Set("Accept", "application/json")
	resp, err := k.cfg.HTTP.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %d", at, resp.StatusCode)
	}
	return read(io.LimitReader(resp.Body, maxKeySet+1))
}

// readKeys reads a key set and refuses one with private or symmetric keys. Keys that
// are not for signatures, too weak, or of a kind that is not known here are passed over
// (RFC 7517, section 5).
func readKeys(r io.Reader) ([]jose.JSONWebKey, error) {
	b, err := io.ReadAll(io.LimitReader(r, maxKeySet+1))
	if err != nil {
		return nil, err
	}
	if len(b) > maxKeySet {
		return nil, fmt.Errorf("%w: the key set is larger than %d bytes", cells.ErrInvalid, maxKeySet)
	}
	var set struct {
		Keys []json.RawMessage `json:"keys"`
	}
	unread := fmt.Errorf("%w: the key set cannot be read", cells.ErrInvalid) // it may hold what it should not
	if json.Unmarshal(b, &set) != nil {
		return nil, unread
	}
	if len(set.Keys) > maxKeys {
		return nil, fmt.Errorf("%w: the key set has %d keys, at most %d", cells.ErrInvalid, len(set.Keys), maxKeys)
	}
	var out []jose.JSONWebKey
	for _, raw := range set.Keys {
		var members map[string]json.RawMessage
		if json.Unmarshal(raw, &members) != nil {
			return nil, unread
		}
		id := strconv.QuoteToASCII(string(members["kid"]))
		for _, private := range []string{"d", "k", "p", "q", "dp", "dq", "qi", "oth", "priv"} {
			if _, is := members[private]; is {
				return nil, fmt.Errorf("%w: the key set holds key %.100s, which is not public", cells.ErrInvalid, id)
			}
		}
		if string(members["kty"]) == `"oct"` {
			return nil, fmt.Errorf("%w: the key set holds key %.100s, which is not public", cells.ErrInvalid, id)
		}
		var key jose.JSONWebKey
		if json.Unmarshal(raw, &key) != nil {
			continue
		}
		if !key.IsPublic() {
			return nil, fmt.Errorf("%w: the key set holds key %.100q, which is not public", cells.ErrInvalid, key.KeyID)
		}
		if r, ok := key.Key.(*rsa.PublicKey); !key.Valid() || ok && r.N.BitLen() < 2048 || key.Use != "" && key.Use != "sig" {
			continue
		}
		out = append(out, key)
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%w: the key set holds no key that signs", cells.ErrInvalid)
	}
	return out, nil
}

func match(keys []jose.JSONWebKey, kid, alg string) (out []jose.JSONWebKey) {
	for _, k := range keys {
		if (kid == "" || k.KeyID == kid) && (k.Algorithm == "" || k.Algorithm == alg) {
			out = append(out, k)
		}
	}
	return out
}
