// SPDX-License-Identifier: Apache-2.0

package fastpath

import "bytes"

// framing is how the end of an answer's body is found.
type framing int

const (
	bodyNone    framing = iota // there is no body
	bodyLength                 // as many bytes as said
	bodyChunks                 // chunks
	bodyToClose                // until the process closes the connection
)

// answer is the head of an answer.
type answer struct {
	status  int
	fields  []Field // those that go to the client
	framing framing
	length  int
	close   bool // the process closes the connection afterwards
	gate    bool // it is the platform's own, of the cell's gate
}

// parse reads a head, which ends in an empty line. head says that the request was
// HEAD. False means: malformed, or nothing that this package understands.
func (a *answer) parse(b []byte, into []Field, head bool) bool {
	*a = answer{}
	first, fields, ok := lines(b, into)
	if !ok || len(first) < len("HTTP/1.1 200") || string(first[:7]) != "HTTP/1." || first[8] != ' ' || len(first) > 12 && first[12] != ' ' {
		return false
	}
	switch first[7] {
	case '1':
	case '0':
		a.close = true
	default:
		return false
	}
	if a.status, ok = digits(first[9:12]); !ok || a.status < 100 || a.status > 599 || a.status == 101 {
		return false
	}
	for _, c := range first[12:] {
		if !value[c] {
			return false
		}
	}
	kept := fields[:0]
	lengths, chunked := 0, false
	for _, f := range fields {
		n := f.Name
		switch n[0] | 0x20 {
		case 'c':
			switch {
			case equalLower(n, "content-length"):
				lengths++
				length, ok := digits(f.Value)
				if !ok || lengths > 1 {
					return false
				}
				a.length = length
				continue
			case equalLower(n, "connection"):
				switch {
				case equalLower(f.Value, "close"):
					a.close = true
				case !equalLower(f.Value, "keep-alive"):
					return false // it names headers, or asks for another protocol
				}
				continue
			case equalLower(n, "cell-admission"):
				continue
			case equalLower(n, "cell-answer"):
				a.gate = true
			}
		case 't':
			switch {
			case equalLower(n, "transfer-encoding"):
				if chunked || first[7] != '1' || !equalLower(f.Value, "chunked") {
					return false
				}
				chunked = true
				continue
			case equalLower(n, "te"):
				continue
			}
		case 'k':
			if equalLower(n, "keep-alive") {
				continue
			}
		case 'p':
			if equalLower(n, "proxy-connection") || equalLower(n, "proxy-authenticate") || equalLower(n, "proxy-authorization") {
				continue
			}
		case 'u':
			if equalLower(n, "upgrade") {
				continue
			}
		}
		if odd(n) {
			return false
		}
		kept = append(kept, f)
	}
	a.fields = kept
	switch {
	case chunked && lengths > 0:
		return false
	case a.status < 200:
		return !chunked && (lengths == 0 || a.length == 0)
	case a.status == 204:
		if chunked || a.length != 0 {
			return false
		}
	case a.status == 304, head:
		if lengths == 1 {
			a.length = -1 - a.length // said, and not sent
		}
	case chunked:
		a.framing = bodyChunks
	case lengths == 1:
		a.framing = bodyLength
	default:
		a.framing, a.close = bodyToClose, true
	}
	return true
}

// chunks follows the chunks of a body through its bytes.
type chunks struct {
	state chunkState
	left  int // of the chunk's data
	size  int
	n     int // digits of the size
}

type chunkState int

const (
	chunkSize chunkState = iota
	chunkSizeLF
	chunkData
	chunkDataCR
	chunkDataLF
	chunkLastCR
	chunkLastLF
	chunkTrailers
	chunkDone
)

// follow goes through bytes: used says how many belong to the body, of which the last
// is that of its end if done. With trailers used stops before the first of them. False
// means: malformed; extensions of chunks are.
func (c *chunks) follow(b []byte) (used int, done, ok bool) {
	for i := 0; i < len(b); {
		switch ch := b[i]; c.state {
		case chunkSize:
			d := hex(ch)
			switch {
			case d >= 0 && c.n < 8:
				c.size, c.n = c.size<<4|d, c.n+1
			case ch == '\r' && c.n > 0:
				c.state = chunkSizeLF
			default:
				return i, false, false
			}
			i++
		case chunkSizeLF:
			if ch != '\n' {
				return i, false, false
			}
			i++
			c.left, c.state = c.size, chunkData
			if c.size == 0 {
				c.state = chunkLastCR
			}
			c.size, c.n = 0, 0
		case chunkData:
			n := min(c.left, len(b)-i)
			i, c.left = i+n, c.left-n
			if c.left == 0 {
				c.state = chunkDataCR
			}
		case chunkDataCR, chunkLastCR:
			if c.state == chunkLastCR && token[ch] {
				c.state = chunkTrailers
				return i, false, true
			}
			if ch != '\r' {
				return i, false, false
			}
			i++
			c.state++
		case chunkDataLF:
			if ch != '\n' {
				return i, false, false
			}
			i++
			c.state = chunkSize
		case chunkLastLF:
			if ch != '\n' {
				return i, false, false
			}
			c.state = chunkDone
			return i + 1, true, true
		default:
			return i, false, false
		}
	}
	return len(b), false, true
}

func hex(c byte) int {
	switch {
	case c >= '0' && c <= '9':
		return int(c - '0')
	case c|0x20 >= 'a' && c|0x20 <= 'f':
		return int(c|0x20-'a') + 10
	}
	return -1
}

var headEnd = []byte("\r\n\r\n")

// endOfHead returns the length of the head at the beginning of b, or 0 while it is not
// whole. from is how much of b was looked at before.
func endOfHead(b []byte, from int) int {
	i := bytes.Index(b[max(0, from-3):], headEnd)
	if i < 0 {
		return 0
	}
	return max(0, from-3) + i + len(headEnd)
}
