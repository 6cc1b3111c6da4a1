// SPDX-License-Identifier: Apache-2.0

// Package signin verifies the bearer tokens of a cell's requests and says whom they
// stand for.
//
//	v, err := signin.New(signin.Config{Issuers: issuers})
//	defer v.Close()
//	srv.Handler = process.Handler(mux, tenancy.HTTP{Resolve: v.Resolve})
//
// # Who is authoritative
//
// The cell's configuration says whose tokens it accepts; a token of any other issuer
// is UNKNOWN_ISSUER, whoever signed it. The issuer's key set says which keys are its
// own. Nothing that a token carries leads to a key: jwk, jku, x5c and x5u are ignored.
// The algorithms are those listed for the issuer, asymmetric ones only, and a key with
// an algorithm verifies that one alone.
//
// # The keys of an issuer
//
//	none --a fetch lands--> fresh --4/5 of KeysFor--> due, fetched again beside requests
//	due --KeysFor--> old: a request waits for a fetch, and uses the set if that fails
//	old --KeysStale--> none
//
// A token whose key is not in the set makes the set be fetched again, at most once in
// RefreshEvery for whatever is presented; requests that need the same fetch share it,
// and it ends after FetchTimeout. A key that an issuer no longer publishes is used until
// the next fetch, and so at most KeysFor after it, longer only while the issuer does not
// answer, and never past KeysStale. While it does not, fetches go on beside requests,
// which wait for none that follows shortly after one that failed.
//
// # When something fails
//
//   - The keys cannot be had, or the token names a key that a set could have that
//     cannot be fetched: AUTH_UNAVAILABLE, 503 with Retry-After. Never a pass, and never a
//     401 on which a client would drop its session.
//   - The set holds a private or a symmetric key: the fetch counts as failed; what its
//     holder signs could be anybody's. A key of a kind that is not known here is passed
//     over, alone.
//   - The token is malformed, expired, of another audience, signed by another key:
//     UNAUTHENTICATED. What is in it is not logged.
package signin
