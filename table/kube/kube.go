// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/table/internal/pull"
)

const (
	// manager owns the fields that the table writes.
	manager = "cloister"
	// createTries bounds how often a first change is begun again because somebody
	// touched the object without placing the tenant.
	createTries = 5
)

// Table is a [cells.RoutingTable] in a namespace of a Kubernetes API server. Safe
// for concurrent use.
type Table struct {
	client    dynamic.ResourceInterface
	namespace string
	timeout   time.Duration
	period    time.Duration

	life context.Context // ends with Close
	stop context.CancelFunc

	mu    sync.Mutex // guards all below
	walks map[walkKey]*walk
}

var _ cells.RoutingTable = (*Table)(nil)

// Option configures a Table.
type Option func(*Table)

// WithTimeout bounds each request that is no watch; 10 s by default. A shorter
// deadline of the context counts as well.
func WithTimeout(d time.Duration) Option {
	return func(t *Table) { t.timeout = max(d, time.Millisecond) }
}

// WithWatchPeriod sets how long one request of a watch lasts, in whole seconds, at
// least 3; 4 s by default. The server gives a sign of life 2 s before its end. A
// watch whose request has not ended 5 s after it should have is broken.
func WithWatchPeriod(d time.Duration) Option {
	return func(t *Table) { t.period = max(d.Round(time.Second), 3*time.Second) }
}

// Open connects to an API server and opens the table in a namespace there. The
// server must answer and know the resource. Without a limit of its own in cfg the
// client sends as fast as it is asked to. The error wraps [cells.ErrInvalid] or
// [cells.ErrUnavailable].
func Open(ctx context.Context, cfg *rest.Config, namespace string, opts ...Option) (*Table, error) {
	cfg = rest.CopyConfig(cfg)
	if cfg.QPS == 0 && cfg.RateLimiter == nil {
		cfg.QPS = -1 // the default of 5 requests a second is made for controllers
	}
	cfg.Timeout = 0 // would end watches; requests have theirs
	client, err := dynamic.NewForConfig(cfg)
	if err != nil {
		return nil, fmt.Errorf("%w: kubernetes client: %v", cells.ErrInvalid, err)
	}
	return New(ctx, client, namespace, opts...)
}

// New opens the table on a client that the caller still owns. The server must
// answer and know the resource. The error wraps [cells.ErrInvalid] or
// [cells.ErrUnavailable].
func New(ctx context.Context, client dynamic.Interface, namespace string, opts ...Option) (*Table, error) {
	if namespace == "" {
		return nil, fmt.Errorf("%w: no namespace", cells.ErrInvalid)
	}
	t := &Table{client: client.Resource(GVR).Namespace(namespace), namespace: namespace, timeout: 10 * time.Second, period: 4 * time.Second,
		walks: make(map[walkKey]*walk)}
	for _, o := range opts {
		o(t)
	}
	t.life, t.stop = context.WithCancel(context.Background())
	if _, err := t.current(ctx); err != nil {
		t.stop()
		return nil, err
	}
	return t, nil
}

// Close ends every watch and every later call with [cells.ErrClosed]. It may be
// called again.
func (t *Table) Close() error {
	t.stop()
	return nil
}

var errTableClosed = fmt.Errorf("%w: table", cells.ErrClosed)

// begin refuses what need not reach the server.
func (t *Table) begin(ctx context.Context) error {
	if t.life.Err() != nil {
		return errTableClosed
	}
	return pull.EndOf(ctx)
}

// call returns the context of one request.
func (t *Table) call(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithTimeout(ctx, t.timeout)
	unlink := context.AfterFunc(t.life, cancel)
	return ctx, func() { unlink(); cancel() }
}

// failed translates an error of the client; ctx is the caller's.
func (t *Table) failed(ctx context.Context, doing string, err error) error {
	if t.life.Err() != nil {
		return errTableClosed
	}
	if end := pull.EndOf(ctx); end != nil {
		return fmt.Errorf("%s: %w", doing, end)
	}
	kind := cells.ErrUnavailable
	switch {
	case apierrors.IsResourceExpired(err), apierrors.IsGone(err):
		kind = cells.ErrCompacted
	case apierrors.IsInvalid(err), apierrors.IsBadRequest(err), apierrors.IsRequestEntityTooLargeError(err):
		kind = cells.ErrInvalid
	}
	return fmt.Errorf("%w: %s: kubernetes: %v", kind, doing, err)
}

// Get implements [cells.RoutingTable].
func (t *Table) Get(ctx context.Context, tenant cells.TenantID) (cells.TenantRoute, error) {
	if err := t.begin(ctx); err != nil {
		return cells.TenantRoute{}, err
	}
	name, err := Name(tenant)
	if err != nil {
		return cells.TenantRoute{}, err
	}
	_, r, err := t.read(ctx, name)
	if err == nil && r.Revision == 0 {
		err = fmt.Errorf("%w for %s", cells.ErrNotFound, tenant)
	}
	return r, err
}

// read returns the object and its row: nil and the zero row where there is none.
func (t *Table) read(ctx context.Context, name string) (*unstructured.Unstructured, cells.TenantRoute, error) {
	c, done := t.call(ctx)
	defer done()
	obj, err := t.client.Get(c, name, metav1.GetOptions{})
	switch {
	case err == nil:
		r, _, err := decode(obj)
		return obj, r, err
	case apierrors.IsNotFound(err) && isObject(err):
		return nil, cells.TenantRoute{}, nil
	}
	return nil, cells.TenantRoute{}, t.failed(ctx, "reading a route", err)
}

// isObject tells an object that is not there from a resource that the server does
// not know.
func isObject(err error) bool {
	var st apierrors.APIStatus
	return errors.As(err, &st) && st.Status().Details != nil && st.Status().Details.Kind == Resource && st.Status().Details.Name != ""
}

// CompareAndSet implements [cells.RoutingTable]. An error that wraps neither
// [cells.ErrConflict] nor [cells.ErrInvalid] leaves the outcome unknown.
func (t *Table) CompareAndSet(ctx context.Context, old cells.Revision, next cells.TenantRoute) (cells.TenantRoute, error) {
	if err := t.begin(ctx); err != nil {
		return cells.TenantRoute{}, err
	}
	next = cells.CanonicalRoute(next)
	next.Revision = 0
	if err := cells.ValidateRoute(next); err != nil {
		return cells.TenantRoute{}, err
	}
	name, err := Name(next.TenantID)
	if err != nil {
		return cells.TenantRoute{}, err
	}
	status, err := statusOf(next, old)
	if err != nil {
		return cells.TenantRoute{}, err
	}
	for range createTries {
		obj, cur, err := t.read(ctx, name)
		if err != nil {
			return cells.TenantRoute{}, err
		}
		if cur.Revision != old {
			return cells.TenantRoute{}, fmt.Errorf("%w: %s is at revision %d, not %d", cells.ErrConflict, next.TenantID, cur.Revision, old)
		}
		if err := cells.ValidateChange(cur, next); err != nil {
			return cells.TenantRoute{}, err
		}
		if obj, err = t.ready(ctx, obj, name, next.TenantID); err != nil {
			return cells.TenantRoute{}, t.failed(ctx, "creating the object of "+string(next.TenantID), err)
		}
		if obj == nil || old != 0 && obj.GetResourceVersion() != rvString(old) {
			continue // touched meanwhile: look again
		}
		revision, err := t.swap(ctx, obj, status, next, old)
		if err == nil {
			next.Revision = revision
			return next, nil
		}
		if old != 0 || !errors.Is(err, cells.ErrConflict) {
			return cells.TenantRoute{}, err
		}
	}
	return cells.TenantRoute{}, fmt.Errorf("%w: the object of %s is being changed by others", cells.ErrConflict, next.TenantID)
}

// ready returns the object with the finalizer, created if it is nil; nil if
// somebody else was faster. The client's errors are returned as they are.
func (t *Table) ready(ctx context.Context, obj *unstructured.Unstructured, name string, tenant cells.TenantID) (*unstructured.Unstructured, error) {
	c, done := t.call(ctx)
	defer done()
	if obj == nil {
		obj = &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": Group + "/" + Version, "kind": Kind,
			"metadata": map[string]any{"name": name, "namespace": t.namespace, "finalizers": []any{Finalizer}},
			"spec":     map[string]any{"tenant": string(tenant)},
		}}
		obj, err := t.client.Create(c, obj, metav1.CreateOptions{FieldManager: manager, FieldValidation: metav1.FieldValidationStrict})
		if apierrors.IsAlreadyExists(err) {
			return nil, nil
		}
		return obj, err
	}
	if slices.Contains(obj.GetFinalizers(), Finalizer) {
		return obj, nil
	}
	obj = obj.DeepCopy()
	obj.SetFinalizers(append(obj.GetFinalizers(), Finalizer))
	obj, err := t.client.Update(c, obj, metav1.UpdateOptions{FieldManager: manager})
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) && isObject(err) {
		return nil, nil
	}
	return obj, err
}

// swap writes the status of an object at its resourceVersion and returns the new
// revision, or an error that is the caller's.
func (t *Table) swap(ctx context.Context, obj *unstructured.Unstructured, status map[string]any, next cells.TenantRoute, old cells.Revision) (cells.Revision, error) {
	c, done := t.call(ctx)
	defer done()
	obj = obj.DeepCopy()
	obj.Object["status"] = status
	got, err := t.client.UpdateStatus(c, obj, metav1.UpdateOptions{FieldManager: manager, FieldValidation: metav1.FieldValidationStrict})
	switch {
	case err == nil:
		return revisionOf(got.GetResourceVersion())
	case apierrors.IsConflict(err), apierrors.IsNotFound(err) && isObject(err):
		// The client repeats a request where the server asks it to, so that this may be
		// the answer to its second.
		if revision, settled := t.settle(ctx, next, old); settled && revision != 0 {
			return revision, nil
		}
		return 0, fmt.Errorf("%w: %s has left revision %d", cells.ErrConflict, next.TenantID, old)
	case apierrors.IsInvalid(err), apierrors.IsBadRequest(err), apierrors.IsRequestEntityTooLargeError(err):
		return 0, t.failed(ctx, "changing the route of "+string(next.TenantID), err)
	case apierrors.IsForbidden(err), apierrors.IsUnauthorized(err), apierrors.IsTooManyRequests(err):
		return 0, t.failed(ctx, "changing the route of "+string(next.TenantID)+", which was refused", err)
	}
	unknown := t.failed(ctx, "changing the route of "+string(next.TenantID)+", whose outcome is unknown", err)
	if ctx.Err() != nil || t.life.Err() != nil {
		return 0, unknown
	}
	switch revision, settled := t.settle(ctx, next, old); {
	case !settled:
		return 0, unknown
	case revision == 0:
		return 0, fmt.Errorf("%w: %s has left revision %d", cells.ErrConflict, next.TenantID, old)
	default:
		return revision, nil
	}
}

// settle reads what became of a change whose answer was no success. It is settled
// if the row follows old: then that is the change that won, and revision is its own
// if it is this one, 0 if it is another's.
func (t *Table) settle(ctx context.Context, next cells.TenantRoute, old cells.Revision) (revision cells.Revision, settled bool) {
	name, err := Name(next.TenantID)
	if err != nil {
		return 0, false
	}
	obj, cur, err := t.read(ctx, name)
	if err != nil || cur.Revision <= old {
		return 0, false // not now; it may still be carried out
	}
	if before, ok := follows(obj); !ok || before != old {
		return 0, false
	}
	revision, cur.Revision = cur.Revision, 0
	a, errA := cells.EncodeRoute(cur)
	b, errB := cells.EncodeRoute(next)
	switch {
	case errA != nil || errB != nil:
		return 0, false
	case string(a) != string(b):
		return 0, true
	case next.Stamp == "":
		return 0, false // equal, but whose is not to be told
	}
	return revision, true
}
