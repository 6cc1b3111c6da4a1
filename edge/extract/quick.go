// SPDX-License-Identifier: Apache-2.0

package extract

// Head is a request's head as bytes, for [List.Quick].
type Head interface {
	// Header returns a header's value by its name in lower case, and how often it is there.
	Header(lower string) (value []byte, n int)
}

// Quick is the result of [List.Quick]. Its bytes are the head's.
type Quick struct {
	Tenant []byte
	// StripHeader is a header that must not reach the cell, in lower case, or "".
	StripHeader string
}

// Quick finds the tenant where that takes no more than a look at headers: as long as
// the extractors, in their order, are headers, or one is fixed. False says that
// [List.Resolve] has to be asked, whatever the reason; the tenant is not validated.
func (l *List) Quick(h Head) (q Quick, ok bool) {
	for i := range l.rules {
		r := &l.rules[i]
		switch {
		case r.header != "":
			v, n := h.Header(r.header)
			switch n {
			case 0:
				continue
			case 1:
				q.Tenant = v
				if r.strip {
					q.StripHeader = r.header
				}
				return q, true
			}
			return q, false
		case r.fixed != nil:
			return Quick{Tenant: r.fixed}, true
		}
		return q, false
	}
	return q, false
}
