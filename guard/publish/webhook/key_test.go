// SPDX-License-Identifier: Apache-2.0

package webhook_test

import (
	"crypto/ed25519"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard/publish/webhook"
)

func key(t *testing.T, s string) webhook.Key {
	t.Helper()
	k, err := webhook.ParseKey(s)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// The vector of the specification's reference libraries.
const (
	specSecret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
	specID     = "msg_p5jXN8AQM9LWM0D4loKWxJek"
	specBody   = `{"test": 2432232314}`
	specSig    = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
)

var specTime = time.Unix(1614265330, 0)

func TestSpecificationVector(t *testing.T) {
	k := key(t, specSecret)
	if got := webhook.Sign([]webhook.Key{k}, specID, specTime, []byte(specBody)); got != specSig {
		t.Errorf("signed %s, want %s", got, specSig)
	}
	if k.Text() != specSecret {
		t.Errorf("the text is %s", k.Text())
	}
}

// The key of RFC 8032, section 7.1, test 1, as both forms of a private key.
func TestEd25519(t *testing.T) {
	seed := []byte{0x9d, 0x61, 0xb1, 0x9d, 0xef, 0xfd, 0x5a, 0x60, 0xba, 0x84, 0x4a, 0xf4, 0x92, 0xec, 0x2c, 0xc4,
		0x44, 0x49, 0xc5, 0x69, 0x7b, 0x32, 0x69, 0x19, 0x70, 0x3b, 0xac, 0x03, 0x1c, 0xae, 0x7f, 0x60}
	public := ed25519.NewKeyFromSeed(seed).Public().(ed25519.PublicKey)
	if got := fmt.Sprintf("%x", public); got != "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a" {
		t.Fatal(got)
	}
	enc := base64.StdEncoding.EncodeToString
	k := key(t, "whsk_"+enc(seed))
	if k.Text() != "whsk_"+enc(append(seed, public...)) || key(t, k.Text()).Text() != k.Text() {
		t.Errorf("the text is not seed and public key")
	}
	pub, ok := k.Public()
	if !ok || pub.Text() != "whpk_"+enc(public) {
		t.Errorf("the public key is %s", pub.Text())
	}
	sig := webhook.Sign([]webhook.Key{k}, specID, specTime, []byte(specBody))
	raw, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(sig, "v1a,"))
	if err != nil || !ed25519.Verify(public, []byte(specID+".1614265330."+specBody), raw) {
		t.Errorf("%s is no signature (%v)", sig, err)
	}
	if err := webhook.Verify([]webhook.Key{key(t, pub.Text())}, headers(specID, "1614265330", sig), []byte(specBody), specTime, time.Minute); err != nil {
		t.Error(err)
	}
	if got := webhook.Sign([]webhook.Key{pub}, specID, specTime, nil); got != "" {
		t.Errorf("a public key signed %s", got)
	}
	if _, ok := key(t, specSecret).Public(); ok {
		t.Error("a secret has a public key")
	}
}

func TestKeyText(t *testing.T) {
	enc := func(n int) string { return base64.StdEncoding.EncodeToString(make([]byte, n)) }
	for _, bad := range []string{
		"", "whsec_", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "WHSEC_" + enc(24), "whsec_" + enc(23), "whsec_" + enc(65), "whsec_!!", "whsec_ " + enc(24),
		"whsec_" + enc(24) + "\n", "whsk_" + enc(31), "whsk_" + enc(64), "whpk_" + enc(31), "whxx_" + enc(32),
	} {
		if _, err := webhook.ParseKey(bad); !errors.Is(err, cells.ErrInvalid) || len(bad) > 10 && strings.Contains(err.Error(), bad[6:]) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	for _, n := range []int{24, 64} {
		key(t, "whsec_"+enc(n))
	}
	if webhook.NewSecret().Text() == webhook.NewSecret().Text() || webhook.NewPrivateKey().Text() == webhook.NewPrivateKey().Text() {
		t.Error("two new keys are the same")
	}
	keys, err := webhook.ParseKeys("# current\n" + specSecret + "\r\n\n" + webhook.NewPrivateKey().Text())
	if err != nil || len(keys) != 2 {
		t.Errorf("%d keys, %v", len(keys), err)
	}
	for _, bad := range []string{"", "# none\n", specSecret + "\nwhsec_x"} {
		if _, err := webhook.ParseKeys(bad); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	for _, k := range []webhook.Key{key(t, specSecret), webhook.NewPrivateKey()} {
		for _, f := range []string{"%v", "%s", "%+v", "%#v"} {
			if s := fmt.Sprintf(f, k); strings.Contains(s, k.Text()[6:]) || !strings.Contains(s, "webhook") {
				t.Errorf("%s prints %s", f, s)
			}
		}
	}
}

func headers(id, stamp, sig string) http.Header {
	h := http.Header{}
	h.Set(webhook.HeaderID, id)
	h.Set(webhook.HeaderTimestamp, stamp)
	h.Set(webhook.HeaderSignature, sig)
	return h
}

func TestVerify(t *testing.T) {
	const stamp = "1614265330"
	k, other := key(t, specSecret), webhook.NewSecret()
	private := webhook.NewPrivateKey()
	public, _ := private.Public()
	const tolerance = 5 * time.Minute
	noise := "v1,Ceo5qEr07ixe2NLpvHk3FH9bwy/WavXrAFQ/9tdO6mc="
	both := webhook.Sign([]webhook.Key{k, private}, specID, specTime, []byte(specBody))
	twice := headers(specID, stamp, specSig)
	twice.Add(webhook.HeaderID, "other")
	for _, c := range []struct {
		name string
		h    http.Header
		keys []webhook.Key
		at   time.Time
		good bool
	}{
		{"good", headers(specID, stamp, specSig), []webhook.Key{k}, specTime, true},
		{"several signatures", headers(specID, stamp, noise+" v2,"+noise[3:]+" "+specSig+" "+noise), []webhook.Key{k}, specTime, true},
		{"several keys", headers(specID, stamp, specSig), []webhook.Key{other, public, k}, specTime, true},
		{"rotation, by the old key", headers(specID, stamp, both), []webhook.Key{k}, specTime, true},
		{"rotation, by the new key", headers(specID, stamp, both), []webhook.Key{public}, specTime, true},
		{"at the edge", headers(specID, stamp, specSig), []webhook.Key{k}, specTime.Add(tolerance), true},
		{"no keys", headers(specID, stamp, specSig), nil, specTime, false},
		{"zero key", headers(specID, stamp, specSig), []webhook.Key{{}}, specTime, false},
		{"another key", headers(specID, stamp, specSig), []webhook.Key{other}, specTime, false},
		{"no id", headers("", stamp, specSig), []webhook.Key{k}, specTime, false},
		{"no timestamp", headers(specID, "", specSig), []webhook.Key{k}, specTime, false},
		{"no signature", headers(specID, stamp, ""), []webhook.Key{k}, specTime, false},
		{"empty signature", headers(specID, stamp, "v1,"), []webhook.Key{k}, specTime, false},
		{"part of the signature", headers(specID, stamp, specSig[:20]), []webhook.Key{k}, specTime, false},
		{"another version", headers(specID, stamp, "v2"+specSig[2:]), []webhook.Key{k}, specTime, false},
		{"asymmetric version of a secret's", headers(specID, stamp, "v1a"+specSig[2:]), []webhook.Key{k, public}, specTime, false},
		{"another id", headers("msg_other", stamp, specSig), []webhook.Key{k}, specTime, false},
		{"two ids", twice, []webhook.Key{k}, specTime, false},
		{"another timestamp", headers(specID, "1614265331", specSig), []webhook.Key{k}, specTime, false},
		{"timestamp with a sign", headers(specID, "+"+stamp, specSig), []webhook.Key{k}, specTime, false},
		{"timestamp with a zero", headers(specID, "0"+stamp, specSig), []webhook.Key{k}, specTime, false},
		{"too old", headers(specID, stamp, specSig), []webhook.Key{k}, specTime.Add(tolerance + time.Second), false},
		{"too new", headers(specID, stamp, specSig), []webhook.Key{k}, specTime.Add(-tolerance - time.Second), false},
		{"shifted full stop", headers(specID+"."+stamp, stamp, specSig), []webhook.Key{k}, specTime, false},
		{"flood of signatures", headers(specID, stamp, strings.Repeat(noise+" ", 100)+specSig), []webhook.Key{k}, specTime, false},
	} {
		err := webhook.Verify(c.keys, c.h, []byte(specBody), c.at, tolerance)
		if (err == nil) != c.good || err != nil && !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	if err := webhook.Verify([]webhook.Key{k}, headers(specID, stamp, specSig), []byte(`{"test":2432232314}`), specTime, tolerance); err == nil {
		t.Error("another body is good")
	}
}
