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
	keys, fresh, usable := k.state()
	found := match(keys, kid, alg)
	switch {
	case usable && len(found) > 0 && fresh:
		return found, nil
	case usable && len(found) > 0:
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
	keys, _, usable = k.state()
	k.mu.Lock()
	failure := k.failure
	k.mu.Unlock()
	found = match(keys, kid, alg)
	switch {
	case usable && len(found) > 0:
		return found, nil
	case failure != nil:
		// A set that cannot be fetched could have the key by now.
		return nil, fmt.Errorf("%w: %w", errKeys, failure)
	case !usable:
		return nil, errKeys
	}
	return nil, errNoKey
}

// state returns the keys; fresh says that they need not be fetched, usable that they
// may be used.
func (k *keySet) state() (keys []jose.JSONWebKey, fresh, usable bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.keys == nil {
		return nil, false, false
	}
	age := k.cfg.Now().Sub(k.fetched)
	keysFor := k.cfg.KeysFor
	if k.isFile() {
		keysFor = min(keysFor, fileFor)
	}
	if age >= k.cfg.KeysStale {
		return nil, false, false
	}
	return k.keys, age < keysFor, true
}

// fileFor is how long a set from a file is used before the file is read again.
const fileFor = 2 * time.Second

// refresh starts a fetch, or joins the one that runs; nil when it is too early for
// another. The channel is closed when the fetch has ended.
func (k *keySet) refresh() <-chan struct{} {
	every := k.cfg.RefreshEvery
	if k.isFile() {
		every = min(every, fileFor)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case k.flight != nil:
		return k.flight
	case !k.tried.IsZero() && k.cfg.Now().Sub(k.tried) < every, k.life.Err() != nil:
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
// are not for signatures, or too weak, are passed over.
func readKeys(r io.Reader) ([]jose.JSONWebKey, error) {
	b, err := io.ReadAll(io.LimitReader(r, maxKeySet+1))
	if err != nil {
		return nil, err
	}
	if len(b) > maxKeySet {
		return nil, fmt.Errorf("%w: the key set is larger than %d bytes", cells.ErrInvalid, maxKeySet)
	}
	var set jose.JSONWebKeySet
	if err := json.Unmarshal(b, &set); err != nil {
		return nil, fmt.Errorf("%w: the key set cannot be read", cells.ErrInvalid) // it may hold what it should not
	}
	if len(set.Keys) > maxKeys {
		return nil, fmt.Errorf("%w: the key set has %d keys, at most %d", cells.ErrInvalid, len(set.Keys), maxKeys)
	}
	var out []jose.JSONWebKey
	for _, key := range set.Keys {
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
