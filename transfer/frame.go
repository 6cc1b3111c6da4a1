// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"

	"github.com/cloister-dev/cloister/cells"
)

// A stream is a sequence of frames: a kind, the lengths of a JSON header and of
// the data behind it, big endian, then both. It ends with frameEnd or
// frameError; a stream that ends otherwise was cut off.
const (
	frameBatch = 'B' // header Batch, data Batch.Data
	frameAlive = 'K' // nothing; says that the other side lives
	frameError = 'E' // header wireError
	frameEnd   = 'Z' // nothing
)

const (
	frameHead = 9
	// maxHeader and maxData bound one frame. Batches stay below [BatchBytes] unless
	// one row is larger.
	maxHeader = 1 << 20
	maxData   = 64 << 20
	// maxBody bounds a request.
	maxBody = 16 << 20
)

// BatchBytes is the size at which stores end a batch.
const BatchBytes = 256 << 10

// MaxRowBytes is the largest row that can be moved; stores refuse a larger one
// with [ErrTooLarge].
const MaxRowBytes = maxData - (1 << 16)

func writeFrame(w io.Writer, kind byte, header any, data []byte) error {
	var h []byte
	if header != nil {
		var err error
		if h, err = json.Marshal(header); err != nil {
			return err
		}
	}
	if len(h) > maxHeader || len(data) > maxData {
		return fmt.Errorf("%w: header of %d bytes, data of %d", ErrTooLarge, len(h), len(data))
	}
	buf := make([]byte, frameHead, frameHead+len(h))
	buf[0] = kind
	binary.BigEndian.PutUint32(buf[1:], uint32(len(h)))
	binary.BigEndian.PutUint32(buf[5:], uint32(len(data)))
	if _, err := w.Write(append(buf, h...)); err != nil {
		return err
	}
	if len(data) == 0 {
		return nil
	}
	_, err := w.Write(data)
	return err
}

// readFrame reads one frame. It allocates no more than what arrives, whatever
// the lengths claim.
func readFrame(r *bufio.Reader) (kind byte, header, data []byte, err error) {
	var head [frameHead]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, nil, nil, cutOff(err)
	}
	h, d := binary.BigEndian.Uint32(head[1:]), binary.BigEndian.Uint32(head[5:])
	if h > maxHeader || d > maxData {
		return 0, nil, nil, fmt.Errorf("%w: header of %d bytes, data of %d", ErrTooLarge, h, d)
	}
	switch head[0] {
	case frameBatch, frameAlive, frameError, frameEnd:
	default:
		return 0, nil, nil, fmt.Errorf("%w: transfer: frame of kind %q", cells.ErrInvalid, head[0])
	}
	if header, err = readN(r, int(h)); err == nil {
		data, err = readN(r, int(d))
	}
	return head[0], header, data, err
}

func readN(r io.Reader, n int) ([]byte, error) {
	const step = 1 << 20
	out := make([]byte, 0, min(n, step))
	for len(out) < n {
		k := min(n-len(out), step)
		at := len(out)
		out = append(out, make([]byte, k)...)
		if _, err := io.ReadFull(r, out[at:]); err != nil {
			return nil, cutOff(err)
		}
	}
	return out, nil
}

func cutOff(err error) error {
	return fmt.Errorf("%w: transfer: the stream was cut off: %w", cells.ErrUnavailable, err)
}
