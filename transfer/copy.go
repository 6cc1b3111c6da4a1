// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// bulkImport is an [Import] whose Copy takes several batches of one table as one: their
// data joined, the key and the end of the last.
type bulkImport interface {
	// CopyBytes is how many bytes one Copy may take.
	CopyBytes() int
}

// FormBinary is Postgres' own binary form of rows, of tables whose columns have one that is
// the same in all databases.
const FormBinary = "binary"

type binaryKey struct{}

// ContextWithBinaryRows lets View.Rows yield rows in the form [FormBinary]. Targets of
// earlier builds do not ask for it.
func ContextWithBinaryRows(ctx context.Context) context.Context {
	return context.WithValue(ctx, binaryKey{}, true)
}

// BinaryRows reports whether [ContextWithBinaryRows] was called.
func BinaryRows(ctx context.Context) bool {
	yes, _ := ctx.Value(binaryKey{}).(bool)
	return yes
}

// copyTable copies a table's rows behind a key. The source is read and sent while rows
// are imported: what arrives meanwhile waits in a feed, and is imported in one
// transaction where the store can do that.
func (p *preparing) copyTable(ctx context.Context, view View, table string, after []byte, began time.Time, base int64) error {
	rctx, cancel := context.WithCancelCause(ContextWithBinaryRows(ctx))
	f := newFeed()
	go func() {
		defer close(f.done)
		f.err = view.Rows(rctx, table, after, func(b Batch) error {
			if err := p.watch.clear(rctx); err != nil {
				return err
			}
			if err := p.pace.wait(rctx, b.Count); err != nil {
				return err
			}
			if err := f.put(rctx, b); err != nil {
				return err
			}
			if !b.End && time.Since(began) > p.v.o.viewAge {
				return errRotate
			}
			return nil
		})
	}()
	// The view is used by one caller at a time.
	defer func() {
		cancel(errStopped)
		<-f.done
	}()
	bulk := 0
	if i, ok := p.imp.(bulkImport); ok {
		bulk = i.CopyBytes()
	}
	var joined []byte // made when there is more than one batch
	for {
		b, err := f.rows(ctx, &joined, bulk)
		if err != nil {
			return err
		}
		if err := p.imp.Copy(ctx, b); err != nil {
			return err
		}
		p.report(table, began, base)
		if err := p.v.o.fault("batch"); err != nil {
			return err
		}
		if b.End {
			return nil
		}
	}
}

// rows waits for a batch of rows, and joins to it those that wait behind it, up to bulk
// bytes in joined. The data is good until the next call.
func (f *feed) rows(ctx context.Context, joined *[]byte, bulk int) (Batch, error) {
	var b Batch
	select {
	case b = <-f.in:
	case <-ctx.Done():
		return Batch{}, context.Cause(ctx)
	case <-f.done:
		select {
		case b = <-f.in:
		default:
			if f.err == nil {
				return Batch{}, cells.ErrUnavailable // ended without an end
			}
			return Batch{}, f.err
		}
	}
	f.took(b)
	for first := true; !b.End && len(b.Data)+2*BatchBytes <= bulk; first = false {
		select {
		case n := <-f.in:
			if first {
				if *joined == nil {
					*joined = make([]byte, 0, bulk)
				}
				b.Data = append((*joined)[:0], b.Data...)
			}
			f.took(n)
			b.Data, b.Count, b.LastKey, b.End = append(b.Data, n.Data...), b.Count+n.Count, n.LastKey, n.End
		default:
			return b, nil
		}
	}
	return b, nil
}
