// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"
	"io"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/cloister-dev/cloister/directory/provision"
)

// Render writes the manifests that the provisioner applies, as YAML documents. The same
// spec gives the same bytes.
func Render(w io.Writer, f Fleet, s provision.Spec) error {
	list, err := Objects(f, s)
	if err != nil {
		return err
	}
	for _, o := range list {
		b, err := yaml.Marshal(o.Object)
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintf(w, "---\n%s", b); err != nil {
			return err
		}
	}
	return nil
}

// File is one manifest and the name of its file.
type File struct {
	Name string
	Data []byte
}

// RenderFiles returns the manifests one by one, named in the order in which they are
// applied.
func RenderFiles(f Fleet, s provision.Spec) ([]File, error) {
	list, err := Objects(f, s)
	if err != nil {
		return nil, err
	}
	var out []File
	for i, o := range list {
		b, err := yaml.Marshal(o.Object)
		if err != nil {
			return nil, err
		}
		out = append(out, File{fmt.Sprintf("%s-%d-%s.yaml", Name(s.Cell), i+1, strings.ToLower(o.GetKind())), b})
	}
	return out, nil
}
