// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/provision"
)

// Manager is the field manager of a cell's objects; what a drain marks has another.
const (
	Manager      = "cloister-provisioner"
	drainManager = Manager + "-drain"
)

// resources of a cell, in the order in which they are applied; they are deleted the
// other way around.
var resources = []struct {
	gvr  schema.GroupVersionResource
	kind string
}{
	{schema.GroupVersionResource{Version: "v1", Resource: "serviceaccounts"}, "ServiceAccount"},
	{schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}, "ConfigMap"},
	{schema.GroupVersionResource{Version: "v1", Resource: "services"}, "Service"},
	{schema.GroupVersionResource{Group: "networking.k8s.io", Version: "v1", Resource: "networkpolicies"}, "NetworkPolicy"},
	{schema.GroupVersionResource{Group: "policy", Version: "v1", Resource: "poddisruptionbudgets"}, "PodDisruptionBudget"},
	{schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "deployments"}, "Deployment"},
	{schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "statefulsets"}, "StatefulSet"},
}

var claims = schema.GroupVersionResource{Version: "v1", Resource: "persistentvolumeclaims"}

// Config is what a [Provisioner] is made of.
type Config struct {
	Fleet  Fleet
	Client dynamic.Interface
	// Living, if set, asks the directory which processes of a cell it hears: a cell is
	// ready when they say so, whatever the cluster's probes do.
	Living func(ctx context.Context, cell cells.CellID) ([]provision.Live, error)
	// Force takes over fields that another owner has.
	Force bool
	// ReadyWithin bounds how long an upgrade is waited for; default 10 minutes. Poll is how
	// often it is looked at; default 1 s.
	ReadyWithin time.Duration
	Poll        time.Duration
	Log         *slog.Logger
}

// Provisioner applies cells to a cluster.
type Provisioner struct {
	cfg Config

	mu sync.Mutex
	// retired has the generations of cells that were retired here, of which nothing is left
	// that could say it; guarded by mu.
	retired map[cells.CellID]int64
}

var _ provision.Provisioner = (*Provisioner)(nil)

// New returns a provisioner.
func New(cfg Config) *Provisioner {
	if cfg.ReadyWithin <= 0 {
		cfg.ReadyWithin = 10 * time.Minute
	}
	if cfg.Poll <= 0 {
		cfg.Poll = time.Second
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Provisioner{cfg: cfg, retired: map[cells.CellID]int64{}}
}

func (p *Provisioner) at(gvr schema.GroupVersionResource) dynamic.ResourceInterface {
	return p.cfg.Client.Resource(gvr).Namespace(p.cfg.Fleet.Namespace)
}

// Provision implements [provision.Provisioner].
func (p *Provisioner) Provision(ctx context.Context, s provision.Spec) error {
	if _, err := Objects(p.cfg.Fleet, s); err != nil {
		return err
	}
	if w, err := p.workload(ctx, s.Cell); err != nil || w != nil && version(w) != s.Version {
		return err // processes of another version are left to Upgrade
	}
	return p.Upgrade(ctx, s)
}

// Upgrade implements [provision.Provisioner].
func (p *Provisioner) Upgrade(ctx context.Context, s provision.Spec) error {
	list, err := Objects(p.cfg.Fleet, s)
	if err != nil {
		return err
	}
	for _, o := range list {
		if err := p.apply(ctx, o, Manager); err != nil {
			return err
		}
	}
	if err := p.undrain(ctx, list[len(list)-1]); err != nil {
		return err
	}
	return p.wait(ctx, s)
}

func resourceOf(kind string) schema.GroupVersionResource {
	for _, r := range resources {
		if r.kind == kind {
			return r.gvr
		}
	}
	return schema.GroupVersionResource{}
}

// apply applies an object, unless one of that name is somebody else's.
func (p *Provisioner) apply(ctx context.Context, o *unstructured.Unstructured, manager string) error {
	what := fmt.Sprintf("%s %s/%s", o.GetKind(), o.GetNamespace(), o.GetName())
	r := p.at(resourceOf(o.GetKind()))
	have, err := r.Get(ctx, o.GetName(), metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
	case err != nil:
		return unavailable(what, err)
	case !p.ours(have, cells.CellID(o.GetLabels()[LabelCell])) && !p.cfg.Force:
		return fmt.Errorf("%w: %s is there and carries no label %s of the cell", provision.ErrConflict, what, LabelCell)
	}
	_, err = r.Apply(ctx, o.GetName(), o, metav1.ApplyOptions{FieldManager: manager, Force: p.cfg.Force})
	if err == nil {
		return nil
	}
	if fields := conflicts(err); len(fields) > 0 {
		return fmt.Errorf("%w: %s: %s", provision.ErrConflict, what, strings.Join(fields, "; "))
	}
	return unavailable(what, err)
}

func (p *Provisioner) ours(o *unstructured.Unstructured, cell cells.CellID) bool {
	l := o.GetLabels()
	return l[LabelFleet] == p.cfg.Fleet.Name && l[LabelCell] == string(cell)
}

// conflicts names the fields that others own.
func conflicts(err error) []string {
	var st apierrors.APIStatus
	if !errors.As(err, &st) || st.Status().Reason != metav1.StatusReasonConflict {
		return nil
	}
	var out []string
	if d := st.Status().Details; d != nil {
		for _, c := range d.Causes {
			if c.Type == metav1.CauseTypeFieldManagerConflict {
				out = append(out, c.Field+" ("+c.Message+")")
			}
		}
	}
	if len(out) == 0 {
		out = append(out, err.Error())
	}
	return out
}

// unavailable keeps what the API server says; a request that it refuses as malformed
// will not do however often it is repeated.
func unavailable(what string, err error) error {
	if apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) {
		return fmt.Errorf("%w: %s: %w", cells.ErrInvalid, what, err)
	}
	return fmt.Errorf("%s: %w", what, err)
}

// workload returns the cell's Deployment or StatefulSet, nil if there is none.
func (p *Provisioner) workload(ctx context.Context, cell cells.CellID) (*unstructured.Unstructured, error) {
	for _, kind := range []string{"Deployment", "StatefulSet"} {
		o, err := p.at(resourceOf(kind)).Get(ctx, Name(cell), metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
		case err != nil:
			return nil, unavailable(kind+" "+Name(cell), err)
		case p.ours(o, cell):
			return o, nil
		}
	}
	return nil, nil
}

func version(o *unstructured.Unstructured) string {
	v, _, _ := unstructured.NestedString(o.Object, "spec", "template", "metadata", "labels", LabelVersion)
	return v
}

func number(o *unstructured.Unstructured, fields ...string) int64 {
	n, _, _ := unstructured.NestedInt64(o.Object, fields...)
	return n
}

// Status implements [provision.Provisioner].
func (p *Provisioner) Status(ctx context.Context, cell cells.CellID) (provision.Status, error) {
	st := provision.Status{Cell: cell}
	w, err := p.workload(ctx, cell)
	if err != nil {
		return st, err
	}
	if w == nil {
		return p.without(ctx, st)
	}
	want := number(w, "spec", "replicas")
	st.Replicas, st.Ready = int(number(w, "status", "replicas")), int(number(w, "status", "readyReplicas"))
	updated := number(w, "status", "updatedReplicas")
	seen := number(w, "status", "observedGeneration") == w.GetGeneration()
	st.Updated = int(min(updated, int64(st.Ready)))
	done := seen && st.Replicas == int(want) && updated == want && st.Ready == int(want)
	if done {
		st.Version = version(w)
	} else if !seen || updated < int64(st.Replicas) {
		st.Updated = 0 // which of them are ready is not known
	}
	if done, err = p.heard(ctx, &st, version(w), done); err != nil {
		return st, err
	}
	generation, _ := strconv.ParseInt(w.GetAnnotations()[AnnotationGeneration], 10, 64)
	if drained := w.GetAnnotations()[AnnotationDraining]; drained != "" {
		st.Phase = provision.PhaseDraining
		st.ObservedGeneration, _ = strconv.ParseInt(drained, 10, 64)
		return st, nil
	}
	switch {
	case done:
		st.Phase, st.ObservedGeneration = provision.PhaseRunning, generation
	case updated < int64(st.Replicas) || !seen:
		st.Phase = provision.PhaseUpgrading
	default:
		st.Phase = provision.PhaseProvisioning
	}
	return st, nil
}

// heard goes by what the processes say of themselves, if the directory can be asked.
func (p *Provisioner) heard(ctx context.Context, st *provision.Status, want string, done bool) (bool, error) {
	if p.cfg.Living == nil {
		return done, nil
	}
	living, err := p.cfg.Living(ctx, st.Cell)
	if err != nil {
		return false, err
	}
	ready, updated := 0, 0
	st.Version = ""
	for i, l := range living {
		if i == 0 {
			st.Version = l.Version
		} else if st.Version != l.Version {
			st.Version = ""
		}
		if l.Ready {
			ready++
			if l.Version == want {
				updated++
			}
		}
	}
	st.Ready, st.Updated = ready, updated
	return done && updated >= st.Replicas && st.Version == want, nil
}

// without is the status of a cell that has no workload: is anything of it left?
func (p *Provisioner) without(ctx context.Context, st provision.Status) (provision.Status, error) {
	left, err := p.Left(ctx, st.Cell)
	if err != nil {
		return st, err
	}
	p.mu.Lock()
	st.Phase, st.ObservedGeneration = provision.PhaseRetired, p.retired[st.Cell]
	p.mu.Unlock()
	for _, l := range left {
		if !strings.HasPrefix(l, "PersistentVolumeClaim ") {
			st.Phase, st.ObservedGeneration = provision.PhasePending, 0
		}
	}
	return st, nil
}

// Left names the objects of a cell that are there.
func (p *Provisioner) Left(ctx context.Context, cell cells.CellID) ([]string, error) {
	var out []string
	for _, r := range resources {
		o, err := p.at(r.gvr).Get(ctx, Name(cell), metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
		case err != nil:
			return nil, unavailable(r.kind+" "+Name(cell), err)
		case p.ours(o, cell):
			out = append(out, r.kind+" "+o.GetName())
		}
	}
	list, err := p.claims(ctx, cell)
	if err != nil {
		return nil, err
	}
	for i := range list {
		out = append(out, "PersistentVolumeClaim "+list[i].GetName())
	}
	return out, nil
}

func (p *Provisioner) claims(ctx context.Context, cell cells.CellID) ([]unstructured.Unstructured, error) {
	list, err := p.at(claims).List(ctx, metav1.ListOptions{LabelSelector: LabelFleet + "=" + p.cfg.Fleet.Name + "," + LabelCell + "=" + string(cell)})
	if err != nil {
		return nil, unavailable("volumes of cell "+string(cell), err)
	}
	return list.Items, nil
}

// wait waits until the cell is as the spec wants it.
func (p *Provisioner) wait(ctx context.Context, s provision.Spec) error {
	late := fmt.Errorf("cell %s: not ready within %v", s.Cell, p.cfg.ReadyWithin)
	ctx, cancel := context.WithTimeoutCause(ctx, p.cfg.ReadyWithin, late)
	defer cancel()
	tick := time.NewTicker(p.cfg.Poll)
	defer tick.Stop()
	for {
		st, err := p.Status(ctx, s.Cell)
		if err == nil && st.ObservedGeneration == s.Generation && st.Phase == provision.PhaseRunning {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%w: %d of %d processes are ready, %d of version %s", context.Cause(ctx), st.Ready, s.Replicas, st.Updated, s.Version)
		}
	}
}

// Drain implements [provision.Provisioner].
func (p *Provisioner) Drain(ctx context.Context, s provision.Spec) error {
	w, err := p.workload(ctx, s.Cell)
	if err != nil {
		return err
	}
	if w == nil {
		return fmt.Errorf("cell %s does not run", s.Cell)
	}
	return p.apply(ctx, marked(w, object{AnnotationDraining: fmt.Sprint(s.Generation)}), drainManager)
}

// undrain takes the mark of a drain away: its manager owns nothing any more.
func (p *Provisioner) undrain(ctx context.Context, o *unstructured.Unstructured) error {
	w, err := p.workload(ctx, cells.CellID(o.GetLabels()[LabelCell]))
	if err != nil || w == nil || w.GetAnnotations()[AnnotationDraining] == "" {
		return err
	}
	return p.apply(ctx, marked(w, nil), drainManager)
}

// marked is the part of a workload that a drain owns.
func marked(w *unstructured.Unstructured, annotations object) *unstructured.Unstructured {
	meta := object{"name": w.GetName(), "namespace": w.GetNamespace(),
		"labels": object{LabelCell: w.GetLabels()[LabelCell], LabelFleet: w.GetLabels()[LabelFleet]}}
	if annotations != nil {
		meta["annotations"] = annotations
	}
	return &unstructured.Unstructured{Object: object{"apiVersion": w.GetAPIVersion(), "kind": w.GetKind(), "metadata": meta}}
}

// Retire implements [provision.Provisioner].
func (p *Provisioner) Retire(ctx context.Context, s provision.Spec) error {
	if err := s.Cell.Validate(); err != nil {
		return err
	}
	foreground := metav1.DeletePropagationForeground
	for i := len(resources) - 1; i >= 0; i-- {
		r := resources[i]
		o, err := p.at(r.gvr).Get(ctx, Name(s.Cell), metav1.GetOptions{})
		if err == nil && p.ours(o, s.Cell) {
			uid := o.GetUID()
			err = p.at(r.gvr).Delete(ctx, Name(s.Cell), metav1.DeleteOptions{PropagationPolicy: &foreground, Preconditions: &metav1.Preconditions{UID: &uid}})
		}
		if err != nil && !apierrors.IsNotFound(err) {
			return unavailable(r.kind+" "+Name(s.Cell), err)
		}
	}
	if !s.KeepStore {
		list, err := p.claims(ctx, s.Cell)
		if err != nil {
			return err
		}
		for i := range list {
			if err := p.at(claims).Delete(ctx, list[i].GetName(), metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
				return unavailable("volume "+list[i].GetName(), err)
			}
		}
	}
	return p.gone(ctx, s)
}

// gone waits until the objects are.
func (p *Provisioner) gone(ctx context.Context, s provision.Spec) error {
	ctx, cancel := context.WithTimeoutCause(ctx, p.cfg.ReadyWithin, fmt.Errorf("cell %s: objects are left after %v", s.Cell, p.cfg.ReadyWithin))
	defer cancel()
	tick := time.NewTicker(p.cfg.Poll)
	defer tick.Stop()
	for {
		left, err := p.Left(ctx, s.Cell)
		if err == nil && (len(left) == 0 || s.KeepStore && strings.HasPrefix(left[0], "PersistentVolumeClaim ")) {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.retired[s.Cell] = s.Generation
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), fmt.Errorf("left: %s", strings.Join(left, ", ")), err)
		}
	}
}
