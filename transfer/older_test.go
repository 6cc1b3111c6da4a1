// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"
	"net/http"
	"testing"
)

// older takes off what builds before forms and kinds did not send.
type older struct{ http.RoundTripper }

func (o older) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Del(digestHeader)
	r.Header.Del(formHeader)
	return o.RoundTripper.RoundTrip(r)
}

// bothKinds is an import that has both kinds of digests.
type bothKinds struct {
	Import
	sum string
}

func (i bothKinds) Digests(ctx context.Context, _ []KeySet) ([]Digest, error) {
	if PlainDigests(ctx) {
		return []Digest{{Table: "t", Rows: 1, Sum: i.sum}}, nil
	}
	return []Digest{{Table: "t", Rows: 1, Sum: "h:" + i.sum}}, nil
}

// TestOlderBuilds: agents of two builds compare what both can compute, and send what both
// can read.
func TestOlderBuilds(t *testing.T) {
	for _, c := range []struct {
		name         string
		older        bool
		kind, form   string
		digestsAgree string
	}{{"same build", false, "h", FormBinary, "h:s"}, {"older build", true, "", "", "s"}} {
		_, src := serve(t, &fake{closed: make(chan struct{})})
		if c.older {
			src.(*remote).client.Transport = older{src.(*remote).client.Transport}
		}
		v, err := src.View(t.Context(), testMove)
		if err != nil {
			t.Fatal(err)
		}
		sets := []KeySet{{Table: "t", All: true}}
		ours, theirs, err := digestBoth(t.Context(), bothKinds{sum: "s"}, v, sets)
		if err != nil || ours[0] != theirs[0] || ours[0].kind() != c.kind || ours[0].Sum != c.digestsAgree {
			t.Errorf("%s: %v and %v, %v", c.name, ours, theirs, err)
		}
		if ours, theirs, err := digestBoth(t.Context(), bothKinds{sum: "other"}, v, sets); err != nil || ours[0] == theirs[0] {
			t.Errorf("%s: rows that differ: %v and %v, %v", c.name, ours, theirs, err)
		}
		var form string
		if err := v.Rows(ContextWithBinaryRows(t.Context()), "t", nil, func(b Batch) error { form = b.Form; return nil }); err != nil || form != c.form {
			t.Errorf("%s: rows in form %q, %v", c.name, form, err)
		}
		if err := v.Close(); err != nil {
			t.Error(err)
		}
	}
}
