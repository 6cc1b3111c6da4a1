// SPDX-License-Identifier: Apache-2.0

package gormtx

import (
	"strconv"
	"strings"
)

type kind uint8

const (
	word   kind = iota // an unquoted name or keyword, in upper case in key
	quoted             // a quoted name
	text               // a string; its value is in text
	param              // a placeholder; n is its place in the arguments, from 0
	other              // a number or a sign
)

type token struct {
	kind kind
	text string // a name as it is compared: unquoted ones in lower case
	key  string // an unquoted name in upper case, or the sign
	n    int
}

func (t token) is(keys ...string) bool {
	for _, k := range keys {
		if t.key == k {
			return true
		}
	}
	return false
}

func (t token) name() bool { return t.kind == word || t.kind == quoted }

// lex cuts a statement of Postgres or SQLite into tokens; comments are dropped. It
// never fails: what it does not know becomes a sign, which no check takes for
// anything good.
func lex(s string) []token {
	var out []token
	params := 0
	for i := 0; i < len(s); {
		c := s[i]
		switch {
		case c <= ' ':
			i++
		case strings.HasPrefix(s[i:], "--"):
			i = skipTo(s, i, "\n")
		case strings.HasPrefix(s[i:], "/*"):
			end, nested := skipComment(s, i)
			if nested {
				out = append(out, token{kind: other, key: unreadable})
			}
			i = end
		case c == '\'':
			v, end := quotedUntil(s, i+1, '\'', false)
			out, i = append(out, token{kind: text, text: v}), end
		case (c == 'e' || c == 'E') && i+1 < len(s) && s[i+1] == '\'':
			v, end := quotedUntil(s, i+2, '\'', true)
			out, i = append(out, token{kind: text, text: v}), end
		case c == '"' || c == '`':
			v, end := quotedUntil(s, i+1, c, false)
			out, i = append(out, token{kind: quoted, text: v}), end
		case c == '?':
			end := digits(s, i+1)
			n := params
			if end > i+1 {
				n = atoi(s[i+1:end]) - 1
			}
			params = n + 1
			out, i = append(out, token{kind: param, n: n}), end
		case c == '$':
			if end := digits(s, i+1); end > i+1 {
				out, i = append(out, token{kind: param, n: atoi(s[i+1:end]) - 1}), end
				continue
			}
			v, end := dollarQuoted(s, i)
			out, i = append(out, token{kind: text, text: v}), end
		case letter(c):
			end := i + 1
			for end < len(s) && (letter(s[end]) || s[end] >= '0' && s[end] <= '9' || s[end] == '$') {
				end++
			}
			out, i = append(out, token{kind: word, text: strings.ToLower(s[i:end]), key: strings.ToUpper(s[i:end])}), end
		case c >= '0' && c <= '9':
			end := i + 1
			for end < len(s) && (letter(s[end]) || s[end] >= '0' && s[end] <= '9' || s[end] == '.') {
				end++
			}
			out, i = append(out, token{kind: other, key: s[i:end]}), end
		case strings.HasPrefix(s[i:], "::"):
			out, i = append(out, token{kind: other, key: "::"}), i+2
		default:
			out, i = append(out, token{kind: other, key: s[i : i+1]}), i+1
		}
	}
	return out
}

func letter(c byte) bool { return c == '_' || c|0x20 >= 'a' && c|0x20 <= 'z' || c >= 0x80 }

func digits(s string, i int) int {
	for i < len(s) && s[i] >= '0' && s[i] <= '9' {
		i++
	}
	return i
}

func atoi(s string) int {
	n, err := strconv.Atoi(s)
	if err != nil {
		return -1
	}
	return n
}

func skipTo(s string, i int, end string) int {
	if j := strings.Index(s[i:], end); j >= 0 {
		return i + j + len(end)
	}
	return len(s)
}

// unreadable is the sign of what the two databases read differently.
const unreadable = "/* /* */"

// skipComment skips a comment. One within another ends elsewhere on Postgres than on
// SQLite, so nested says that the statement is not to be trusted.
func skipComment(s string, i int) (end int, nested bool) {
	body := s[i+2:]
	j := strings.Index(body, "*/")
	if j < 0 {
		return len(s), false
	}
	return i + 2 + j + 2, strings.Contains(body[:j], "/*")
}

// quotedUntil reads up to the closing quote; a doubled one stands for itself.
func quotedUntil(s string, i int, q byte, backslash bool) (string, int) {
	var b strings.Builder
	for i < len(s) {
		switch {
		case backslash && s[i] == '\\' && i+1 < len(s):
			b.WriteString(s[i : i+2])
			i += 2
		case s[i] == q && i+1 < len(s) && s[i+1] == q:
			b.WriteByte(q)
			i += 2
		case s[i] == q:
			return b.String(), i + 1
		default:
			b.WriteByte(s[i])
			i++
		}
	}
	return b.String(), i
}

// dollarQuoted reads $tag$...$tag$, or a sign.
func dollarQuoted(s string, i int) (string, int) {
	j := i + 1
	for j < len(s) && (letter(s[j]) || s[j] >= '0' && s[j] <= '9') {
		j++
	}
	if j >= len(s) || s[j] != '$' {
		return "$", i + 1
	}
	tag := s[i : j+1]
	end := strings.Index(s[j+1:], tag)
	if end < 0 {
		return s[j+1:], len(s)
	}
	return s[j+1 : j+1+end], j + 1 + end + len(tag)
}
