// crdcheck says, with the API server's own code and without a cluster, what the API server would say to a
// CustomResourceDefinition and to its objects, of which a ValidatingAdmissionPolicy is asked too.
//
//	crdcheck CRD.yaml POLICY.yaml < requests.jsonl
//
// The first line of the answer is about the definition. Each further line answers one request:
//
//	{"verb": "create" | "update" | "updateStatus", "object": {...}, "old": {...}}
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/install"
	crdvalidation "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/validation"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

type request struct {
	Verb   string                     `json:"verb"`
	Object *unstructured.Unstructured `json:"object"`
	Old    *unstructured.Unstructured `json:"old"`
}

type refusal struct {
	Type    string `json:"type"`
	Field   string `json:"field"`
	Message string `json:"message"`
}

type answer struct {
	// What would be stored and read back.
	Object map[string]any `json:"object,omitempty"`
	// What a strict client, as kubectl is by default, is refused for.
	Unknown []string `json:"unknown"`
	// What every client is refused for.
	Errors []refusal `json:"errors"`
	// The row that `kubectl get` prints.
	Cells []any `json:"cells,omitempty"`
}

func main() {
	if err := run(os.Args[1], os.Args[2], os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "crdcheck:", err)
		os.Exit(2)
	}
}

func run(path, rules string, in io.Reader, out io.Writer) error {
	definition, err := read(path)
	if err != nil {
		return err
	}
	answers := json.NewEncoder(out)
	refused := crdvalidation.ValidateCustomResourceDefinition(context.Background(), definition)
	if err := answers.Encode(answer{Errors: refusals(refused), Unknown: []string{}}); err != nil || len(refused) > 0 {
		return err
	}
	server, err := newServer(definition, rules)
	if err != nil {
		return err
	}
	requests := json.NewDecoder(bufio.NewReader(in))
	for requests.More() {
		var asked request
		if err := requests.Decode(&asked); err != nil {
			return err
		}
		if err := answers.Encode(server.answer(asked)); err != nil {
			return err
		}
	}
	return nil
}

// read decodes as strictly as kubectl asks the API server to.
func read(path string) (*apiextensions.CustomResourceDefinition, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	scheme := runtime.NewScheme()
	install.Install(scheme)
	decoder := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDecoder(apiextensions.SchemeGroupVersion)
	object, _, err := decoder.Decode(text, nil, nil)
	if err != nil {
		return nil, err
	}
	definition, ok := object.(*apiextensions.CustomResourceDefinition)
	if !ok {
		return nil, fmt.Errorf("%s holds a %T", path, object)
	}
	// Set by the API server before it validates.
	for _, version := range definition.Spec.Versions {
		if version.Storage {
			definition.Status.StoredVersions = []string{version.Name}
		}
	}
	return definition, nil
}

func refusals(errors field.ErrorList) []refusal {
	found := []refusal{}
	for _, each := range errors {
		found = append(found, refusal{string(each.Type), each.Field, said(each)})
	}
	return found
}

// said is a policy's own words, or what the API server makes of a field's.
func said(refused *field.Error) string {
	if refused.Field == policyField {
		return refused.Detail
	}
	return refused.ErrorBody()
}
