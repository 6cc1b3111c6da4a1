// SPDX-License-Identifier: Apache-2.0

package login

import (
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/cloister-dev/cloister/cells"
)

const (
	// maxAddress bounds an address, in bytes.
	maxAddress = 8 << 10
	// maxAnswer bounds every answer of a deployment and of a provider, in bytes.
	maxAnswer = 1 << 20
	// maxPrintable bounds what is shown of a text of somebody else's, in characters.
	maxPrintable = 1000
)

// CheckAddress reports whether an address that a provider names may be used, shown and
// opened: https, or http on a loopback address, with a host and nothing that an opener
// could take for an option or another scheme. The error wraps [cells.ErrInvalid].
func CheckAddress(address string) error {
	bad := fmt.Errorf("%w: login: %.100q is not https, and no http on a loopback address", cells.ErrInvalid, address)
	hidden := func(r rune) bool { return unicode.IsSpace(r) || !unicode.IsPrint(r) }
	if len(address) > maxAddress || !utf8.ValidString(address) || strings.ContainsFunc(address, hidden) {
		return bad
	}
	u, err := url.Parse(address)
	if err != nil || !strings.HasPrefix(address, "https://") && !strings.HasPrefix(address, "http://") || u.Fragment != "" || u.User != nil {
		return bad
	}
	if checkHost(u.Scheme+"://"+u.Host) != nil {
		return bad
	}
	return nil
}

// Printable is a text as it may be shown on a terminal: without control and other
// characters that are not printed, and cut to 1,000 characters.
func Printable(s string) string {
	n := 0
	return strings.Map(func(r rune) rune {
		if n++; n > maxPrintable || r == utf8.RuneError {
			return -1
		}
		if unicode.IsSpace(r) {
			return ' '
		}
		if !unicode.IsPrint(r) {
			return -1
		}
		return r
	}, s)
}

// printable is an error whose text may hold what a provider answers.
type printable struct{ error }

func (p printable) Error() string { return Printable(p.error.Error()) }
func (p printable) Unwrap() error { return p.error }

// bounded ends an answer that is too long.
type bounded struct{ http.RoundTripper }

func (b bounded) RoundTrip(r *http.Request) (*http.Response, error) {
	next := b.RoundTripper
	if next == nil {
		next = http.DefaultTransport
	}
	resp, err := next.RoundTrip(r)
	if err == nil {
		resp.Body = &boundedBody{resp.Body, maxAnswer}
	}
	return resp, err
}

type boundedBody struct {
	io.ReadCloser
	left int
}

func (b *boundedBody) Read(p []byte) (int, error) {
	if len(p) > b.left+1 {
		p = p[:b.left+1]
	}
	n, err := b.ReadCloser.Read(p)
	if b.left -= n; b.left < 0 {
		b.left = 0
		return 0, fmt.Errorf("%w: the answer is longer than %d bytes", cells.ErrUnavailable, maxAnswer)
	}
	return n, err
}
