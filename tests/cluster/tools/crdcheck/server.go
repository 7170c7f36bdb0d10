package main

import (
	"context"
	"fmt"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	v1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	structural "k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/defaulting"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/pruning"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/validation"
	"k8s.io/apiextensions-apiserver/pkg/registry/customresource"
	"k8s.io/apiextensions-apiserver/pkg/registry/customresource/tableconvertor"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/rest"
)

// strategy is what the API server's storage asks before it writes.
type strategy interface {
	PrepareForUpdate(ctx context.Context, obj, old runtime.Object)
	ValidateUpdate(ctx context.Context, obj, old runtime.Object) field.ErrorList
}

type server struct {
	schema *structural.Structural
	create rest.RESTCreateStrategy
	update map[string]strategy
	table  rest.TableConvertor
	rules  *policy
}

// newServer puts together, for the first version, what crdHandler in apiextensions-apiserver does.
func newServer(definition *apiextensions.CustomResourceDefinition, rules string) (*server, error) {
	version := definition.Spec.Versions[0].Name
	whole, err := apiextensions.GetSchemaForVersion(definition, version)
	if err != nil {
		return nil, err
	}
	schemaValidator, _, err := validation.NewSchemaValidator(whole.OpenAPIV3Schema)
	if err != nil {
		return nil, err
	}
	status := whole.OpenAPIV3Schema.Properties["status"]
	statusValidator, _, err := validation.NewSchemaValidator(&status)
	if err != nil {
		return nil, err
	}
	shape, err := structural.NewStructural(whole.OpenAPIV3Schema)
	if err != nil {
		return nil, err
	}
	table, err := tableOf(definition, version)
	if err != nil {
		return nil, err
	}
	kind := schema.GroupVersionKind{Group: definition.Spec.Group, Version: version, Kind: definition.Spec.Names.Kind}
	main := customresource.NewStrategy(
		nil, definition.Spec.Scope == apiextensions.NamespaceScoped, kind, schemaValidator, statusValidator, shape,
		&apiextensions.CustomResourceSubresourceStatus{}, nil, nil,
	)
	update := map[string]strategy{"update": main, "updateStatus": customresource.NewStatusStrategy(main)}
	asked, err := newPolicy(rules, kind, kind.GroupVersion().WithResource(definition.Spec.Names.Plural))
	return &server{schema: shape, create: main, update: update, table: table, rules: asked}, err
}

func tableOf(definition *apiextensions.CustomResourceDefinition, version string) (rest.TableConvertor, error) {
	internal, err := apiextensions.GetColumnsForVersion(definition, version)
	if err != nil {
		return nil, err
	}
	columns := make([]v1.CustomResourceColumnDefinition, len(internal))
	for i := range internal {
		err := v1.Convert_apiextensions_CustomResourceColumnDefinition_To_v1_CustomResourceColumnDefinition(&internal[i], &columns[i], nil)
		if err != nil {
			return nil, err
		}
	}
	return tableconvertor.New(columns)
}

func (s *server) answer(asked request) answer {
	ctx := context.Background()
	unknown := s.read(asked.Object)
	var errors field.ErrorList
	switch chosen, isUpdate := s.update[asked.Verb]; {
	case isUpdate:
		s.read(asked.Old)
		chosen.PrepareForUpdate(ctx, asked.Object, asked.Old)
		errors = chosen.ValidateUpdate(ctx, asked.Object, asked.Old)
		if len(errors) == 0 && asked.Verb == "update" {
			errors = s.rules.refusals(ctx, asked.Object, asked.Old)
		}
	case asked.Verb == "create":
		s.create.PrepareForCreate(ctx, asked.Object)
		errors = s.create.Validate(ctx, asked.Object)
		if len(errors) == 0 {
			errors = s.rules.refusals(ctx, asked.Object, nil)
		}
	default:
		errors = field.ErrorList{field.NotSupported(field.NewPath("verb"), asked.Verb, []string{"create", "update", "updateStatus"})}
	}
	return answer{Object: asked.Object.Object, Unknown: unknown, Errors: refusals(errors), Cells: s.cells(asked.Object)}
}

// read does what happens to a body between the wire and validation: unknown fields and nulls go, defaults come.
func (s *server) read(object *unstructured.Unstructured) []string {
	options := structural.UnknownFieldPathOptions{TrackUnknownFieldPaths: true}
	unknown := pruning.PruneWithOptions(object.Object, s.schema, true, options)
	defaulting.PruneNonNullableNullsWithoutDefaults(object.Object, s.schema)
	defaulting.Default(object.Object, s.schema)
	if unknown == nil {
		return []string{}
	}
	return unknown
}

func (s *server) cells(object *unstructured.Unstructured) []any {
	table, err := s.table.ConvertToTable(context.Background(), object, nil)
	if err != nil || len(table.Rows) != 1 {
		return []any{fmt.Sprint(err)}
	}
	return table.Rows[0].Cells
}
