// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"
	"net/url"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/cloister-dev/cloister/cells"
)

// ParseURL reads the address of a table:
//
//	kube:[namespace][?kubeconfig=FILE][&context=NAME]
//
// Without a kubeconfig it is found as kubectl finds it ($KUBECONFIG, ~/.kube/config),
// and inside a pod its service account is used. Without a namespace it is that of
// the context. The error wraps [cells.ErrInvalid].
func ParseURL(raw string) (cfg *rest.Config, namespace string, err error) {
	fail := func(format string, args ...any) (*rest.Config, string, error) {
		return nil, "", fmt.Errorf("%w: kube url: %s", cells.ErrInvalid, fmt.Sprintf(format, args...))
	}
	rest, ok := strings.CutPrefix(raw, "kube:")
	if !ok {
		return fail("does not begin with kube:")
	}
	namespace, query, _ := strings.Cut(rest, "?")
	if namespace != "" {
		if wrong := validation.IsDNS1123Label(namespace); len(wrong) > 0 {
			return fail("%q is no namespace", namespace)
		}
	}
	q, err := url.ParseQuery(query)
	if err != nil {
		return fail("options are malformed")
	}
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	var overrides clientcmd.ConfigOverrides
	for name, values := range q {
		if len(values) != 1 || values[0] == "" {
			return fail("option %q is empty or repeated", name)
		}
		switch name {
		case "kubeconfig":
			rules.ExplicitPath = values[0]
		case "context":
			overrides.CurrentContext = values[0]
		default:
			return fail("option %q is unknown", name)
		}
	}
	loader := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &overrides)
	if namespace == "" {
		if namespace, _, err = loader.Namespace(); err != nil {
			return fail("kubeconfig: %v", err)
		}
	}
	if cfg, err = loader.ClientConfig(); err != nil {
		return fail("kubeconfig: %v", err)
	}
	return cfg, namespace, nil
}
