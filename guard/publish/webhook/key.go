// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"bytes"
	"crypto/ed25519"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// Prefixes of keys in text.
const (
	secretPrefix  = "whsec_"
	privatePrefix = "whsk_"
	publicPrefix  = "whpk_"
)

// Bounds of a secret, in bytes, and of what a receiver looks at.
const (
	minSecret     = 24
	maxSecret     = 64
	maxSignatures = 16
)

// Key signs or verifies: a shared secret does both, an Ed25519 private key too, a
// public key verifies only. The zero Key is not valid. It prints as what it is,
// not as its value.
type Key struct {
	secret  []byte
	private ed25519.PrivateKey
	public  ed25519.PublicKey
}

// NewSecret returns a random secret of 32 bytes.
func NewSecret() Key {
	b := make([]byte, 32)
	_, _ = rand.Read(b) // never fails
	return Key{secret: b}
}

// Secret makes a key of a shared secret of 24 to 64 bytes. The error wraps
// [cells.ErrInvalid] and has nothing of the secret in it.
func Secret(b []byte) (Key, error) {
	if len(b) < minSecret || len(b) > maxSecret {
		return Key{}, fmt.Errorf("%w: a webhook secret has %d bytes, want %d to %d", cells.ErrInvalid, len(b), minSecret, maxSecret)
	}
	return Key{secret: bytes.Clone(b)}, nil
}

// NewPrivateKey returns a random Ed25519 key.
func NewPrivateKey() Key {
	public, private, _ := ed25519.GenerateKey(nil) // never fails
	return Key{private: private, public: public}
}

// ParseKey reads a key in its text form: whsec_, whsk_ or whpk_ and standard
// base64. A private key is its seed of 32 bytes, or that and the public key. The
// error wraps [cells.ErrInvalid] and has nothing of the key in it.
func ParseKey(s string) (Key, error) {
	bad := func(what string) (Key, error) { return Key{}, fmt.Errorf("%w: %s", cells.ErrInvalid, what) }
	prefix, text, ok := strings.Cut(s, "_")
	if !ok {
		return bad("a webhook key begins with whsec_, whsk_ or whpk_")
	}
	b, err := base64.StdEncoding.Strict().DecodeString(text)
	if err != nil || strings.ContainsAny(text, "\r\n") { // which the decoder skips
		return bad("a webhook key is not base64 after its prefix")
	}
	switch prefix + "_" {
	case secretPrefix:
		return Secret(b)
	case privatePrefix:
		if len(b) != ed25519.SeedSize && len(b) != ed25519.PrivateKeySize {
			return bad(fmt.Sprintf("a private webhook key has %d bytes, want %d or %d", len(b), ed25519.SeedSize, ed25519.PrivateKeySize))
		}
		private := ed25519.NewKeyFromSeed(b[:ed25519.SeedSize])
		if len(b) == ed25519.PrivateKeySize && subtle.ConstantTimeCompare(private, b) != 1 {
			return bad("the halves of a private webhook key do not belong together")
		}
		return Key{private: private, public: private.Public().(ed25519.PublicKey)}, nil
	case publicPrefix:
		if len(b) != ed25519.PublicKeySize {
			return bad(fmt.Sprintf("a public webhook key has %d bytes, want %d", len(b), ed25519.PublicKeySize))
		}
		return Key{public: b}, nil
	}
	return bad("a webhook key begins with whsec_, whsk_ or whpk_")
}

// ParseKeys reads one key a line, as a key file has them; empty lines and lines
// that begin with # are left out. There is at least one.
func ParseKeys(text string) ([]Key, error) {
	var out []Key
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		k, err := ParseKey(line)
		if err != nil {
			return nil, err
		}
		out = append(out, k)
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%w: no webhook key", cells.ErrInvalid)
	}
	return out, nil
}

// Public returns the public key of a private one, and false for a secret.
func (k Key) Public() (Key, bool) { return Key{public: k.public}, k.public != nil }

// Text returns the key in its text form, to be kept as the secret that it is.
func (k Key) Text() string {
	switch {
	case k.secret != nil:
		return secretPrefix + base64.StdEncoding.EncodeToString(k.secret)
	case k.private != nil:
		return privatePrefix + base64.StdEncoding.EncodeToString(k.private)
	}
	return publicPrefix + base64.StdEncoding.EncodeToString(k.public)
}

// String says what kind of key it is.
func (k Key) String() string {
	switch {
	case k.secret != nil:
		return "webhook secret"
	case k.private != nil:
		return "private webhook key"
	case k.public != nil:
		return k.Text()
	}
	return "no webhook key"
}

// GoString is String.
func (k Key) GoString() string { return k.String() }

// LogValue implements [slog.LogValuer].
func (k Key) LogValue() slog.Value { return slog.StringValue(k.String()) }

func (k Key) signs() bool { return k.secret != nil || k.private != nil }

// content is what is signed.
func content(id, stamp string, body []byte) []byte {
	b := make([]byte, 0, len(id)+len(stamp)+2+len(body))
	b = append(append(b, id...), '.')
	b = append(append(b, stamp...), '.')
	return append(b, body...)
}

func (k Key) mac(signed []byte) []byte {
	m := hmac.New(sha256.New, k.secret)
	m.Write(signed)
	return m.Sum(nil)
}

// Sign returns the webhook-signature of a request, by every key in order. A
// public key signs nothing.
func Sign(keys []Key, id string, at time.Time, body []byte) string {
	signed := content(id, strconv.FormatInt(at.Unix(), 10), body)
	var out []string
	for _, k := range keys {
		switch {
		case k.secret != nil:
			out = append(out, "v1,"+base64.StdEncoding.EncodeToString(k.mac(signed)))
		case k.private != nil:
			out = append(out, "v1a,"+base64.StdEncoding.EncodeToString(ed25519.Sign(k.private, signed)))
		}
	}
	return strings.Join(out, " ")
}

// Verify is for receivers: it reports whether one of the keys has signed the
// request, not longer than tolerance ago (or ahead); 5 minutes is usual. The
// body is the one that was received, byte by byte. The error wraps [cells.ErrInvalid]
// and says what is wrong.
func Verify(keys []Key, h http.Header, body []byte, now time.Time, tolerance time.Duration) error {
	for _, name := range []string{HeaderID, HeaderTimestamp, HeaderSignature} {
		if v := h[http.CanonicalHeaderKey(name)]; len(v) != 1 || v[0] == "" {
			return fmt.Errorf("%w: %s must be there once", cells.ErrInvalid, name)
		}
	}
	id, stamp := h.Get(HeaderID), h.Get(HeaderTimestamp)
	if strings.Contains(id, ".") {
		return fmt.Errorf("%w: %s has a full stop, by which what is signed is parted", cells.ErrInvalid, HeaderID)
	}
	secs, err := strconv.ParseInt(stamp, 10, 64)
	if err != nil || strconv.FormatInt(secs, 10) != stamp {
		return fmt.Errorf("%w: %s is no number of seconds", cells.ErrInvalid, HeaderTimestamp)
	}
	if d := now.Sub(time.Unix(secs, 0)); d > tolerance || d < -tolerance {
		return fmt.Errorf("%w: the request was signed %s away from now", cells.ErrInvalid, d.Round(time.Second))
	}
	signed := content(id, stamp, body)
	n := 0
	for sig := range strings.SplitSeq(h.Get(HeaderSignature), " ") {
		if n++; n > maxSignatures {
			break
		}
		version, text, _ := strings.Cut(sig, ",")
		got, err := base64.StdEncoding.Strict().DecodeString(text)
		if err != nil {
			continue
		}
		for _, k := range keys {
			switch {
			case version == "v1" && k.secret != nil && hmac.Equal(got, k.mac(signed)),
				version == "v1a" && k.public != nil && len(got) == ed25519.SignatureSize && ed25519.Verify(k.public, signed, got):
				return nil
			}
		}
	}
	return fmt.Errorf("%w: no signature by one of these keys", cells.ErrInvalid)
}
