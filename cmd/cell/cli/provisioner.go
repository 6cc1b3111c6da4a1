// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/dynamic"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
	"github.com/cloister-dev/cloister/directory/client"
	"github.com/cloister-dev/cloister/directory/provision"
	"github.com/cloister-dev/cloister/directory/provision/kube"
	"github.com/cloister-dev/cloister/internal/files"
	tablekube "github.com/cloister-dev/cloister/table/kube"
)

// kubeFlags say where a cell's objects are.
type kubeFlags struct {
	fleet       kube.Fleet
	defaultCell string
}

func (k *kubeFlags) register(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&k.fleet.Directory, "directory", "", "base URL of the directory's channel listener, as the cells reach it")
	f.StringVar(&k.defaultCell, "default-cell", "", "cell that serves tenants without a route, as the directory has it")
	f.StringVar(&k.fleet.StorageClass, "storage-class", "", "of SQLite stores; default: the cluster's own")
	_ = c.MarkFlagRequired("directory")
}

func (k *kubeFlags) complete() error {
	k.fleet.DefaultCell = cells.CellID(k.defaultCell)
	if k.defaultCell != "" {
		if err := k.fleet.DefaultCell.Validate(); err != nil {
			return &usageError{err}
		}
	}
	if !strings.HasPrefix(k.fleet.Directory, "https://") {
		return usagef("--directory %q: want https://host:port", k.fleet.Directory)
	}
	return nil
}

func (a *app) renderCmd() *cobra.Command {
	var k kubeFlags
	var file, out string
	c := &cobra.Command{
		Use:   "render CELL",
		Short: "Write the Kubernetes manifests of a cell",
		Long: `Write the manifests that cell provisioner applies: for a look, or for a repository that
something else applies from. The spec is the directory's, or a file's (JSON, as in
"spec" of cell cells status CELL --json). The same spec gives the same bytes.

Secrets are referred to and never written: cell-CELL-channel with tls.crt, tls.key and
ca.crt, and cell-CELL-admission with admission.key.`,
		Example: "  cell render c3 --directory https://directory.cells.svc:7443 --namespace cells --fleet-name prod\n  cell render c3 --directory https://d:7443 --namespace cells --fleet-name prod --spec c3.json --out manifests",
		Args:    cobra.ExactArgs(1), ValidArgsFunction: a.completeProvisioned,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := k.complete(); err != nil {
				return err
			}
			id, err := cellArg(args[0])
			if err != nil {
				return err
			}
			if err := cells.CellID(k.fleet.Name).Validate(); err != nil {
				return usagef("--fleet-name: %v", err)
			}
			spec, err := a.specOf(cmd.Context(), id, file)
			if err != nil {
				return err
			}
			if out == "" {
				return kube.Render(a.out, k.fleet, spec)
			}
			list, err := kube.RenderFiles(k.fleet, spec)
			if err != nil {
				return err
			}
			names := []string{}
			for _, f := range list {
				path := filepath.Join(out, f.Name)
				if err := files.Write(path, f.Data, 0o644); err != nil {
					return err
				}
				names = append(names, path)
			}
			return a.print(names, func(w io.Writer) error {
				_, err := fmt.Fprintln(w, strings.Join(names, "\n"))
				return err
			})
		},
	}
	k.register(c)
	f := c.Flags()
	f.StringVar(&k.fleet.Namespace, "namespace", "", "the namespace of the objects")
	f.StringVar(&k.fleet.Name, "fleet-name", "", "the fleet's name, as its certificates have it")
	f.StringVar(&file, "spec", "", "file with the spec; - is standard input; default: the directory's")
	f.StringVar(&out, "out", "", "folder to write one file for each object to; default: standard output")
	_ = c.MarkFlagRequired("namespace")
	_ = c.MarkFlagRequired("fleet-name")
	return c
}

// specOf reads a spec from a file, strictly, or asks the directory.
func (a *app) specOf(ctx context.Context, id cells.CellID, file string) (provision.Spec, error) {
	var s provision.Spec
	if file == "" {
		cl, err := a.client()
		if err != nil {
			return s, err
		}
		p, err := cl.ProvisionedCell(ctx, id, false)
		return p.Spec, err
	}
	in := a.in
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return s, err
		}
		defer f.Close()
		in = f
	}
	dec := json.NewDecoder(io.LimitReader(in, 1<<20))
	dec.DisallowUnknownFields()
	err := dec.Decode(&s)
	if err == nil {
		if _, more := dec.Token(); !errors.Is(more, io.EOF) {
			err = errors.New("more than one document")
		}
	}
	if err != nil {
		return s, usagef("%s is no spec: %v", file, err)
	}
	if s.Cell == "" {
		s.Cell = id
	}
	if s.Desired == "" {
		s.Desired = provision.DesiredServing
	}
	if s.Cell != id {
		return s, usagef("%s is the spec of cell %s, not of %s", file, s.Cell, id)
	}
	return s, nil
}

func (a *app) provisionerCmd() *cobra.Command {
	c := &cobra.Command{
		Use: "provisioner", Short: "What makes cells as the directory wants them", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	c.AddCommand(a.provisionerServe())
	return c
}

func (a *app) provisionerServe() *cobra.Command {
	var k kubeFlags
	var chf channelFlags
	var cluster string
	var force bool
	var ready time.Duration
	c := &cobra.Command{
		Use:   "serve",
		Short: "Reconcile the cells of a Kubernetes cluster with the directory's specs",
		Long: `Watch the directory's specs and apply them to a cluster, server-side, under the field
manager ` + kube.Manager + `. A field that somebody else owns is refused and named in the
cell's status, unless --force takes it over. It may be killed at any time, and two of
them do the same work twice. cell dev has one of its own, for processes.

It speaks to the directory with a certificate of the role provisioner (cell pki issue
provisioner NAME), listens nowhere, and needs no access to cells.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := k.complete(); err != nil {
				return err
			}
			ch, err := chf.open(a, channel.RoleProvisioner)
			if err != nil {
				return err
			}
			cfg, namespace, err := tablekube.ParseURL(cluster)
			if err != nil {
				return &usageError{err}
			}
			dyn, err := dynamic.NewForConfig(cfg)
			if err != nil {
				return err
			}
			source, err := client.Provisioner(ch.Client(channel.Identity{Role: channel.RoleDirectory}), k.fleet.Directory)
			if err != nil {
				return &usageError{err}
			}
			defer source.CloseIdleConnections()
			k.fleet.Name, k.fleet.Namespace = ch.Self().Fleet, namespace
			p := kube.New(kube.Config{Fleet: k.fleet, Client: dyn, Living: source.Living, Force: force, ReadyWithin: ready, Log: a.log})
			a.log.Info("reconciling", "fleet", k.fleet.Name, "namespace", namespace)
			provision.NewReconciler(provision.ReconcilerConfig{Source: source, Provisioner: p, Log: a.log}).Run(cmd.Context())
			return nil
		},
	}
	k.register(c)
	chf.register(c)
	f := c.Flags()
	f.StringVar(&cluster, "cluster", "kube:", "the cluster, as kube:[NAMESPACE][?kubeconfig=FILE&context=NAME]; inside a pod its own")
	f.BoolVar(&force, "force", false, "take over fields that another owner has")
	f.DurationVar(&ready, "ready-within", 10*time.Minute, "how long a version may take to be ready")
	return c
}
