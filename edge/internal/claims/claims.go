// SPDX-License-Identifier: Apache-2.0

// Package claims reads the claims of tokens without verifying anything: what it
// returns says where a request may belong, never who sent it. It has no state. A
// token that two readers could read differently is refused.
package claims

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

// MaxToken bounds a token that is looked at, in bytes.
const MaxToken = 16 << 10

// ErrNone says that the token has no such claim.
var ErrNone = errors.New("no such claim")

// Shaped reports whether a token is a signed JWT by its looks: three segments of which
// the first is an encoded JSON object. Other tokens are opaque to whoever has not made
// them, also those that have two dots for reasons of their own.
func Shaped(raw string) bool {
	head, rest, ok := strings.Cut(raw, ".")
	if !ok || strings.Count(rest, ".") != 1 {
		return false
	}
	b, err := base64.RawURLEncoding.DecodeString(urlAlphabet.Replace(strings.TrimRight(head, "=")))
	return err == nil && isObject(b)
}

// urlAlphabet makes what a lenient reader would accept the encoding that is expected.
var urlAlphabet = strings.NewReplacer("+", "-", "/", "_")

func isObject(b []byte) bool { return bytes.HasPrefix(bytes.TrimLeft(b, " \t\r\n"), []byte("{")) }

// Payload returns the payload of a token of three segments, without looking at the
// signature.
func Payload(raw string) ([]byte, error) {
	_, rest, _ := strings.Cut(raw, ".")
	payload, _, _ := strings.Cut(rest, ".")
	b, err := base64.RawURLEncoding.DecodeString(payload)
	if err != nil {
		return nil, err
	}
	if !isObject(b) {
		return nil, errors.New("the payload is no object")
	}
	return b, nil
}

// Issuer returns the iss claim of a token of three segments.
func Issuer(raw string) (string, error) {
	payload, err := Payload(raw)
	if err != nil {
		return "", err
	}
	return Lookup(payload, []string{"iss"})
}

// Lookup returns the string at the pointer. A name that occurs twice in an object on
// the way is refused: two readers could see two values. The error is [ErrNone] when
// nothing is there.
func Lookup(payload []byte, pointer []string) (string, error) {
	if !json.Valid(payload) {
		return "", errors.New("not JSON")
	}
	for _, name := range pointer {
		dec := json.NewDecoder(bytes.NewReader(payload))
		t, err := dec.Token()
		if err != nil {
			return "", err
		}
		if t != json.Delim('{') {
			return "", ErrNone
		}
		var found json.RawMessage
		for dec.More() {
			key, err := dec.Token()
			if err != nil {
				return "", err
			}
			var v json.RawMessage
			if err := dec.Decode(&v); err != nil {
				return "", err
			}
			if key == name {
				if found != nil {
					return "", fmt.Errorf("claim %q occurs twice", name)
				}
				found = v
			}
		}
		if found == nil {
			return "", ErrNone
		}
		payload = found
	}
	if string(payload) == "null" {
		return "", ErrNone
	}
	var s string
	if err := json.Unmarshal(payload, &s); err != nil {
		return "", errors.New("the claim is no string")
	}
	return s, nil
}
